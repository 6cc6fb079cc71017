"""What glibc does with memory that is freed; with another C library nothing is changed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
LARGEST = 32 << 20  # what its mmap threshold grows to by itself: DEFAULT_MMAP_THRESHOLD_MAX


@contextmanager
def reused(below: int) -> Iterator[None]:
    """Within it freed memory is kept and used again instead of being returned and asked for page
    by page: for the temporaries of a block that is a good part of the time. What is not `below` so
    many bytes is returned at once all the same.

    After it glibc is as it becomes by itself in a program that frees large arrays, and what was
    kept is returned. Otherwise all that later stages ever freed would stay with this process.
    """
    _set(2**31 - 1, below)
    try:
        yield
    finally:
        _set(2 * LARGEST, LARGEST)
        give_back()


def give_back() -> None:
    """Return what is free. Without it, holes between blocks of different sizes add up to about one
    byte per weight, so that the peak grows with depth."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(trim: int, mmap: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, trim)
        mallopt(M_MMAP_THRESHOLD, mmap)
