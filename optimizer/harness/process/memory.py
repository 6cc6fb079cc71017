"""Memory that a process may still allocate."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")  # a container's cgroup, version 2


def read_free(meminfo: Path = MEMINFO, group: Path = GROUP) -> int | None:
    """Return the free bytes of this machine's memory or within the container's limit, the smaller.

    None if both are unknown.
    """
    known = [value for value in (_read_machine(meminfo), _read_group(group)) if value is not None]
    return min(known, default=None)


def _read_machine(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    values = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(values[0][1]) << 10 if values else None


def _read_group(folder: Path) -> int | None:
    try:
        limit, used = ((folder / f"memory.{n}").read_text().strip() for n in ("max", "current"))
    except OSError:
        return None
    return max(int(limit) - int(used), 0) if limit.isdigit() else None
