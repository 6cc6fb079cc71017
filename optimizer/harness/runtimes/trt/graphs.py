"""Captured forwards, kept by what they were captured for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
LIMIT = 16  # each holds a context of its own


class Graphs(Generic[T]):
    """The most recently used captures. A key is due on its second use: capturing costs more than
    the few forwards of a shape that never returns, such as a decoder's.

    release: gives back what a capture holds.
    """

    def __init__(self, release: Callable[[T], None], limit: int = LIMIT) -> None:
        self._graphs: OrderedDict[Hashable, T] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._refused: OrderedDict[Hashable, None] = OrderedDict()
        self._release, self._limit = release, limit

    def get(self, key: Hashable) -> T | None:
        """What was captured for `key`, now the most recently used."""
        if key not in self._graphs:
            return None
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def due(self, key: Hashable) -> bool:
        """Whether `key` was asked about before and is not refused; it is asked from now on."""
        if key in self._refused:
            return False
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > 8 * self._limit:
            self._seen.popitem(last=False)
        return False

    def refuse(self, key: Hashable) -> None:
        """It cannot be captured: not to be tried at each use."""
        self._refused[key] = None
        if len(self._refused) > 8 * self._limit:
            self._refused.popitem(last=False)

    def put(self, key: Hashable, captured: T) -> None:
        """Keep it; the least recently used is released when there are too many."""
        self._graphs[key] = captured
        if len(self._graphs) > self._limit:
            self._release(self._graphs.popitem(last=False)[1])

    def clear(self) -> None:
        """Release all: the addresses they were captured with are no longer."""
        while self._graphs:
            self._release(self._graphs.popitem(last=False)[1])

    def __len__(self) -> int:
        return len(self._graphs)
