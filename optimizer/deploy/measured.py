"""Measure the memory and drain time of a bundle's server by running it on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optimizer.foundation.errors import MachineError
from optimizer.load_test.server import run_server

STATUS = "/proc/{}/status"


@dataclass(frozen=True)
class MeasuredServer:
    """Memory and times of a bundle's server to be deployed, measured after warm-up, from which its
    limits follow.

    engine: target of the engine that the server ran.
    peak: peak resident bytes of the process during warm-up with full batches or full slots.
    cache: bytes of the KV cache of all slots, of which the peak may hold none yet.
    longest: seconds of the longest generation with all slots full; 0 for other tasks.
    """

    engine: str
    peak: int
    cache: int
    longest: float

    @property
    def memory(self) -> int:
        """Upper bound of the memory that a deployed server needs, in bytes; the peak may already
        hold part of the cache."""
        return self.peak + self.cache


def measure(folder: Path, arguments: Sequence[str]) -> MeasuredServer:
    """Run the server of the bundle in `folder` with options of `serve`, and return measurements.

    Raises the errors of `run_server`, and MachineError if the system does not report peak memory.
    """
    with run_server(folder, arguments) as server:
        peak = _peak(server.process)
    line = server.warmed_up
    longest = line.get("context", 0) * line.get("full_step_ms", 0.0) / 1000
    return MeasuredServer(str(line["engine"]), peak, line.get("cache_mib", 0) << 20, longest)


def _peak(process: int) -> int:
    try:
        lines = Path(STATUS.format(process)).read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        raise MachineError(
            "the system does not report the peak memory of a process",
            where=STATUS.format("PID"),
            fix="Give --memory-mib, or run this on Linux.",
        ) from None
