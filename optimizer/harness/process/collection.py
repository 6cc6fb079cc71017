"""Python's garbage collection, put off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage before, and none inside.

    Where something is timed, as a collection takes the longer the more is kept, a tenth of a second
    beside a hundred thousand answers. And where TensorRT is given a logger: a builder or runtime
    that an earlier failure left in a cycle would otherwise be freed whenever Python collects, which
    may be inside a message of TensorRT: freeing waits for the lock that TensorRT holds while it
    sends some of them, and the process stands still (TensorRT-RTX 1.7).
    """
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
