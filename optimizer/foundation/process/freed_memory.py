"""Control of the way in which glibc handles freed memory; with another C library nothing
changes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
LARGEST = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX, up to which glibc raises its mmap threshold


@contextmanager
def keep_freed_memory(below: int) -> Iterator[None]:
    """Inside, reuse freed memory instead of returning it to the system page by page, which takes
    much of the time for the temporaries of a block.

    below: allocations of at least this many bytes are still returned when they are freed

    Afterwards glibc has the thresholds that it reaches in a program that frees large arrays, and
    unused memory is returned; otherwise later stages would never return any.
    """
    _set(2**31 - 1, below)
    try:
        yield
    finally:
        _set(2 * LARGEST, LARGEST)
        give_back()


def give_back() -> None:
    """Return this process's unused memory to the system.

    Without it, holes between blocks of different sizes add up to about one byte per weight, so that
    the peak grows with depth.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(trim: int, mmap: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, trim)
        mallopt(M_MMAP_THRESHOLD, mmap)
