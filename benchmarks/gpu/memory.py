"""Device memory that a process of suite.py holds: each times one system, and looks after every
cell, never while one is timed. What these systems allocate they keep, so the largest figure is
their peak but for what comes and goes within a forward; torch counts that itself."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from typing import Any


def asked(query: str) -> list[list[str]]:
    """nvidia-smi's rows; none without a GPU."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.split(", ") for line in done.stdout.splitlines()]


def of_process(rows: list[list[str]], pid: int) -> int | None:
    """MiB of one process among rows of (pid, MiB); None where it is not listed or not told."""
    held = [row[1] for row in rows if row[0].strip() == str(pid)]
    return sum(map(int, held)) if held and all(h.strip().isdigit() for h in held) else None


def of_device(rows: list[list[str]]) -> int | None:
    """MiB in use on the first GPU, by everybody."""
    return int(rows[0][0]) if rows and rows[0][0].strip().isdigit() else None


@dataclass
class Watch:
    """The largest of what `look` saw. before: MiB that the whole GPU held at the start."""

    before: int | None = field(default_factory=lambda: of_device(asked("--query-gpu=memory.used")))
    process: int | None = None
    device: int | None = None

    def look(self) -> None:
        own = of_process(asked("--query-compute-apps=pid,used_memory"), os.getpid())
        whole = of_device(asked("--query-gpu=memory.used"))
        if own is not None:
            self.process = max(own, self.process or 0)
        if whole is not None:
            self.device = max(whole, self.device or 0)

    def told(self) -> dict[str, Any]:
        """{"process_mib": its own, the largest seen after a cell, or null where the driver does not
        tell (containers), "device_growth_mib": what the whole GPU held more than at the start}."""
        known = self.before is not None and self.device is not None
        return {
            "process_mib": self.process,
            "device_growth_mib": self.device - self.before if known else None,  # type: ignore[operator]
        }
