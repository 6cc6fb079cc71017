"""Cache of captured CUDA graphs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
LIMIT = 16  # graphs; each holds its own context


class Graphs(Generic[T]):
    """Least-recently-used cache of the CUDA graphs captured of an engine.

    release: function that frees a capture
    limit: maximum number of captures

    A key is captured on its second use, because capturing costs more than a few forwards, and a
    shape may never return, such as a decoder's.
    """

    def __init__(self, release: Callable[[T], None], limit: int = LIMIT) -> None:
        self._graphs: OrderedDict[Hashable, T] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._refused: OrderedDict[Hashable, None] = OrderedDict()
        self._release, self._limit = release, limit

    def get(self, key: Hashable) -> T | None:
        """Return the captured CUDA graph of a run with these shapes, `key`, and mark it as just
        used; None without one."""
        if key not in self._graphs:
            return None
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def due(self, key: Hashable) -> bool:
        """Return True if an engine's run with the shapes `key` should be captured now as a CUDA
        graph.

        False at the first call for a key, and for a key that was refused.
        """
        if key in self._refused:
            return False
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > 8 * self._limit:
            self._seen.popitem(last=False)
        return False

    def refuse(self, key: Hashable) -> None:
        """Record that runs with these shapes, `key`, cannot be captured as a CUDA graph."""
        self._refused[key] = None
        if len(self._refused) > 8 * self._limit:
            self._refused.popitem(last=False)

    def put(self, key: Hashable, captured: T) -> None:
        """Store a captured CUDA graph; above the limit, release the least recently used one."""
        self._graphs[key] = captured
        if len(self._graphs) > self._limit:
            self._release(self._graphs.popitem(last=False)[1])

    def clear(self) -> None:
        """Release all captured CUDA graphs, because the addresses in them are no longer valid."""
        while self._graphs:
            self._release(self._graphs.popitem(last=False)[1])

    def __len__(self) -> int:
        return len(self._graphs)
