"""Device memory that a process of suite.py holds, read after each cell and never during timing.

These systems keep their allocations, so that the largest figure is their peak except for
allocations within a forward pass, which torch counts itself.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from typing import Any


def asked(query: str) -> list[list[str]]:
    """Read the rows of nvidia-smi; none without a GPU."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.split(", ") for line in done.stdout.splitlines()]


def of_process(rows: list[list[str]], pid: int) -> int | None:
    """Sum MiB of one process in rows of (pid, MiB); None where the driver does not report it."""
    held = [row[1] for row in rows if row[0].strip() == str(pid)]
    return sum(map(int, held)) if held and all(h.strip().isdigit() for h in held) else None


def of_device(rows: list[list[str]]) -> int | None:
    """Read MiB in use on the first GPU, by all processes."""
    return int(rows[0][0]) if rows and rows[0][0].strip().isdigit() else None


@dataclass
class Watch:
    """Largest memory that `look` has read. before: MiB in use on the whole GPU at the start."""

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
        """Report the largest memory after a cell.

        "process_mib" is the process's own, null where the driver does not report it (containers);
        "device_growth_mib" is the growth of the whole GPU since the start.
        """
        known = self.before is not None and self.device is not None
        return {
            "process_mib": self.process,
            "device_growth_mib": self.device - self.before if known else None,  # type: ignore[operator]
        }
