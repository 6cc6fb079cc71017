"""What a bundle's own server takes, measured on this machine: it is started, and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optimizer.foundation.errors import MachineError
from optimizer.load_test.server import run_server

STATUS = "/proc/{}/status"


@dataclass(frozen=True)
class Measured:
    """engine: the target that answered. peak: resident bytes of the process at most, while it ran
    full batches of the longest texts, or its texts together. cache: bytes of all slots of texts
    that are continued, of which the peak may hold none yet. longest: seconds that the longest
    text takes where all slots are full; 0 for models that answer in one run."""

    engine: str
    peak: int
    cache: int
    longest: float

    @property
    def memory(self) -> int:
        """Bytes, at most: the peak may hold some of the cache."""
        return self.peak + self.cache


def measure(folder: Path, arguments: Sequence[str]) -> Measured:
    """Raises what `run_server` does, and MachineError where the system does not say what a process
    takes."""
    with run_server(folder, arguments) as server:
        peak = _peak(server.process)
    line = server.warmed_up
    longest = line.get("context", 0) * line.get("full_step_ms", 0.0) / 1000
    return Measured(str(line["engine"]), peak, line.get("cache_mib", 0) << 20, longest)


def _peak(process: int) -> int:
    try:
        lines = Path(STATUS.format(process)).read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        raise MachineError(
            "the system does not say how much memory a process takes",
            where=STATUS.format("PID"),
            fix="Give --memory-mib; Linux says it.",
        ) from None
