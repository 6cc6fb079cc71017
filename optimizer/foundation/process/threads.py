"""Work that does not depend on the number of threads: each item is computed on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def each(function: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """Yield function(item) of all items, in order, on the number of threads that torch uses.

    torch computes each item on one thread, so sums in it have one order. Also faster than several
    threads on each small operation, which wait for each other, above all on a busy machine.
    """
    import torch

    count = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(function, items)
    finally:
        torch.set_num_threads(count)  # threads that start later have the newest number
