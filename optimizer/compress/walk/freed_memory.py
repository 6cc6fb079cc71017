"""What glibc does with memory that is freed; with another C library nothing is changed."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


def keep(below: int) -> None:
    """Reuse freed memory instead of returning it and asking for pages again: for the temporaries of
    a block that is a good part of the time. What is not `below` so many bytes is still
    returned at once."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, below)


def give_back() -> None:
    """Return what is free. Without it, holes between blocks of different sizes add up to about one
    byte per weight, so that the peak grows with depth."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
