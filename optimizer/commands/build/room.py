"""Does the work that a recipe asks for fit into this machine? Asked before any of it is done."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.commands.build.predictions import in_bytes
from optimizer.foundation.errors import MachineError

PHYSICAL = Path("/proc/meminfo")
LIMITS = (  # of the control group a container runs in
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
ANYWAY = "With --ignore-estimate it is tried all the same."


def check(steps: Sequence[Mapping[str, Any]], store: Path, memory: int | None) -> None:
    """Raise MachineError where a step is predicted to need more memory than there is, or all of
    them more disk than is free below `store`.

    steps: as predictions.document says; memory: bytes of this machine, None where nothing says.
    """
    running = [step for step in steps if step["what"] == "run"]
    largest = max(running, key=lambda step: int(step["memory"]), default=None)
    if largest and memory and largest["memory"] > memory:
        raise MachineError(
            f"it is predicted to need {in_bytes(largest['memory'])} of memory, and this machine "
            f"has {in_bytes(memory)}",
            where=f"stage {largest['stage']}",
            fix="Use a machine with more, or see `optimize plan` for what each stage needs "
            f"(compress.memory_gb and the numbers of samples decide). {ANYWAY}",
        )
    disk, free = sum(int(step["disk"]) for step in running), shutil.disk_usage(_there(store)).free
    if disk > free:
        raise MachineError(
            f"the steps are predicted to write {in_bytes(disk)}, and {in_bytes(free)} are free",
            where=str(store),
            fix=f"Free space, or point --store at another disk. {ANYWAY}",
        )


def memory_of_this_machine() -> int | None:
    """Bytes of memory and swap that a process here can have; None where the system does not say."""
    sizes: list[int] = []
    if PHYSICAL.is_file():
        lines = dict(
            line.split(":", 1) for line in PHYSICAL.read_text().splitlines() if ":" in line
        )
        kilobytes = [int(lines[n].split()[0]) for n in ("MemTotal", "SwapTotal") if n in lines]
        sizes.append(1024 * sum(kilobytes))
    for file in LIMITS:
        try:
            sizes.append(int(file.read_text()))
        except (OSError, ValueError):  # "max": no limit
            continue
    return min((size for size in sizes if size > 0), default=None)


def _there(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    folder = folder.resolve()
    return next(p for p in (folder, *folder.parents) if p.exists())
