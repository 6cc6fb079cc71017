"""Work that does not depend on the number of threads: each item is computed on one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def map_in_threads(
    function: Callable[[In], Out], items: Iterable[In], count: int | None = None
) -> Iterator[Out]:
    """Yield function(item) for all items, in order, for any stage that shares work among this
    process's threads. Items are read as they are needed, and at most `count` results wait.

    count: number of threads; None: the number that torch uses

    torch computes each item on one thread, so that the order of its sums does not change. This is
    also faster than several threads on each small operation, which wait for each other, above all
    on a busy machine.
    """
    import torch

    before = torch.get_num_threads()
    count = count or before
    begun = deque[Future[Out]]()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for item in items:
                begun.append(pool.submit(function, item))
                if len(begun) > count:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
    finally:
        torch.set_num_threads(before)  # threads that start later have the newest number
