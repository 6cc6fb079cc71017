"""What this machine is: everything a fit decision or a measurement depends on, as data."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from .ort.run import cores
from .table import RUNTIMES

PACKAGES = (
    "compressed-tensors",
    "cuda-bindings",
    "gguf",
    "numpy",
    "onnxruntime",
    "onnxruntime-ep-nv-tensorrt-rtx",
    "onnxruntime-ep-nv-tensorrt-rtx-cu12",
    "onnxruntime-ep-nv-tensorrt-rtx-cu13",
    "onnxruntime-gpu",
    "openvino",
    "tensorrt",
    "tensorrt-cu12",
    "tensorrt-cu13",
    "tensorrt-rtx",
    "tokenizers",
    "torch",
    "transformers",
)
CPU_FEATURES = (
    "amx_bf16",
    "amx_int8",
    "avx2",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx512f",
    "avx_ne_convert",
    "avx_vnni",
    "avx_vnni_int8",
)
"""Of a processor's flags those that kernels of low precision are chosen by."""
RUNNERS = frozenset(r.name for r in RUNTIMES.values() if r.runs)
"""Runtimes this harness can run, not only build for."""


@dataclass(frozen=True)
class Gpu:
    """compute_capability as the driver says it: "8.9". driver: "580.65.06"."""

    name: str
    compute_capability: str
    driver: str
    memory_mib: int = 0


@dataclass(frozen=True)
class Machine:
    """os and architecture as Python's platform module says them, in lower case.

    packages: installed distribution -> version. runners: the runtimes the harness can run.
    cpu_features: those of CPU_FEATURES that the processor has; empty where it does not say.
    """

    os: str
    architecture: str
    packages: dict[str, str] = field(default_factory=dict)
    gpu: Gpu | None = None
    runners: frozenset[str] = RUNNERS
    cpu: str = ""
    cores: int = 0
    memory_mib: int = 0
    python: str = ""
    cpu_features: tuple[str, ...] = ()

    def version(self, distributions: Iterable[str]) -> str | None:
        """Of the first of these that is installed; None when none is."""
        return next((self.packages[d] for d in distributions if d in self.packages), None)

    def to_json(self) -> dict[str, Any]:
        """As plain data, for a report."""
        return {**asdict(self), "runners": sorted(self.runners)}


def this_machine() -> Machine:
    """Look at the machine; imports no runtime and starts no GPU context."""
    return Machine(
        os=platform.system().lower(),
        architecture=platform.machine().lower(),
        packages=_packages(),
        gpu=_gpu(),
        cpu=_cpu_name(),
        cores=cores(),
        memory_mib=_memory_mib(),
        python=".".join(map(str, sys.version_info[:3])),
        cpu_features=_cpu_features(),
    )


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _gpu() -> Gpu | None:
    """The first GPU as nvidia-smi lists it; None without a driver."""
    query = "--query-gpu=name,compute_cap,driver_version,memory.total"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        name, capability, driver, memory = done.stdout.splitlines()[0].rsplit(", ", 3)
        return Gpu(name.strip(), capability.strip(), driver.strip(), int(memory))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _cpu_name() -> str:
    return _cpu_says("model name") or platform.processor()


def _cpu_features() -> tuple[str, ...]:
    flags = set(_cpu_says("flags").split())
    return tuple(name for name in CPU_FEATURES if name in flags)


def _cpu_says(field_name: str) -> str:
    """Of the first processor in /proc/cpuinfo; "" where it is not there."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(field_name):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""


def _memory_mib() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    except (AttributeError, ValueError, OSError):
        return 0
