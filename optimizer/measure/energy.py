"""Read the energy of the processors' packages, and of a GPU.

Packages: RAPL counters of Linux, Intel's and AMD's, which the kernel lets only root read, unless an
administrator allows others.
https://www.kernel.org/doc/html/latest/power/powercap/powercap.html

GPU: the counter of NVML, through pynvml (package nvidia-ml-py).
https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html

A counter is of a whole device, whatever programs it runs, and idle power is part of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path("/sys/class/powercap")


@dataclass(frozen=True)
class EnergyCounter:
    """Counter of the energy that one device spends while an engine is measured.

    microjoules: function that reads the counter
    range: value in microjoules at which the counter restarts from 0
    """

    name: str
    microjoules: Callable[[], int]
    range: int


Counters = tuple[Sequence[EnergyCounter], str]
"""(counters, why there is none; "" where there is)."""


class Meter:
    """Meter of the energy that all processor packages and, with `gpu`, the GPU spend on an engine.

    root: folder of powercap
    gpu: True for a model that runs on a GPU
    nvml: module pynvml; None: the installed one

    Attributes: `devices`, names of the counters that are read; `missing`, why others are not, "" if
    all are.
    """

    def __init__(self, root: Path = ROOT, *, gpu: bool = False, nvml: Any = None) -> None:
        kinds = [find_packages(root), *([find_gpus(nvml)] if gpu else [])]
        self._counters = [counter for counters, _ in kinds for counter in counters]
        self.missing = "; ".join(why for _, why in kinds if why)
        self.devices = [counter.name for counter in self._counters]
        self.start()

    def start(self) -> None:
        """Restart the measurement of energy: `joules` counts from here."""
        self._before = [counter.microjoules() for counter in self._counters]

    def joules(self) -> float | None:
        """Return the energy in joules since `start`; None if no counter can be read.

        A counter that restarted from 0 once is corrected.
        """
        if not self._counters:
            return None
        after = [counter.microjoules() for counter in self._counters]
        spent = (
            b - a if b >= a else b - a + counter.range
            for a, b, counter in zip(self._before, after, self._counters, strict=True)
        )
        return sum(spent) / 1e6


def find_packages(root: Path) -> Counters:
    """Return (RAPL counters of the processor packages, reason why there are none or "").

    There is one counter per package name: newer Intel processors list a package twice, in
    intel-rapl:0 and in intel-rapl-mmio:0.

    root: folder of powercap
    """
    counters, why = (
        dict[str, EnergyCounter](),
        f"no {root}/*/energy_uj of a processor's package can be read",
    )
    try:
        for zone in sorted(root.glob("*:*")):
            name = (zone / "name").read_text().strip()
            if name.startswith("package"):
                most = int((zone / "max_energy_range_uj").read_text())
                counters[name] = EnergyCounter(name, _reader(zone / "energy_uj"), most)
                counters[name].microjoules()
    except (OSError, ValueError) as e:
        return [], f"{why} ({e})"
    return list(counters.values()), "" if counters else why


def _reader(file: Path) -> Callable[[], int]:
    return lambda: int(file.read_text())


def find_gpus(nvml: Any = None) -> Counters:
    """Return (NVML's counter of the GPU, reason why there is none or "").

    A machine with several GPUs gives none: NVML and CUDA number them in different orders, so the
    one that runs the model is not known.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        if count != 1:
            return [], f"NVML counts {count} GPUs, and the energy of one is read"
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        gpu = EnergyCounter(
            "gpu", lambda: 1000 * nvml.nvmlDeviceGetTotalEnergyConsumption(handle), 1 << 64
        )
        gpu.microjoules()
    except ImportError:
        return [], "the GPU's energy is not readable without pynvml: pip install nvidia-ml-py"
    except Exception as e:  # the classes of its errors are pynvml's own
        return [], f"the GPU's energy is not readable: NVML: {e}"
    return [gpu], ""
