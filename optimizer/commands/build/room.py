"""Refuse, before any work, a run whose predicted memory or disk exceeds this machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.commands.build.predictions import format_bytes
from optimizer.foundation.errors import MachineError
from optimizer.shared_store import Root, folder_of, folder_option

PHYSICAL = Path("/proc/meminfo")
LIMITS = (  # limits of the control group of a container
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
ANYWAY = "To run anyway: --ignore-estimate."


def check(steps: Sequence[Mapping[str, Any]], store: Root, memory: int | None) -> None:
    """Check before `optimize run`: raise MachineError where a step is predicted to need more than
    `memory`, or all steps together, those to be fetched included, more disk than is free below
    `store`.

    steps: entries of predictions.build_document
    memory: bytes of memory of this machine; None: unknown
    """
    running = [step for step in steps if step["what"] == "run"]
    largest = max(running, key=lambda step: int(step["memory"]), default=None)
    if largest and memory and largest["memory"] > memory:
        validates = largest["stage"] == "validate"
        untimed = "set validate.latency.must_beat_float and time_float to false (text generation), "
        raise MachineError(
            f"predicted memory is {format_bytes(largest['memory'])}, and this machine has "
            f"{format_bytes(memory)}",
            where=f"stage {largest['stage']}",
            fix=f"Use a machine with more memory, {untimed if validates else ''}or lower "
            "compress.memory_gb or the numbers of samples; `optimize plan` shows each stage. "
            f"{ANYWAY}",
        )
    disk = sum(int(step.get("disk", 0)) for step in steps)
    free = shutil.disk_usage(_find_existing(folder_of(store))).free
    if disk > free:
        raise MachineError(
            f"predicted disk use is {format_bytes(disk)}, and {format_bytes(free)} are free",
            where=str(folder_of(store)),
            fix=f"Free space, or point {folder_option(store)} at another disk. {ANYWAY}",
        )


def read_memory_limit() -> int | None:
    """Read how much memory `optimize run` may use: bytes of memory plus swap, or a container's
    lower limit; None where unknown."""
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


def _find_existing(folder: Path) -> Path:
    """Find the folder, or its nearest parent that exists, on whose disk a run will write."""
    folder = folder.resolve()
    return next(p for p in (folder, *folder.parents) if p.exists())
