"""A batch divided by rows among threads, in place of every operator among them.

    answers of rows 0..7 by two threads  =  answers of rows 0..3 beside answers of rows 4..7

Where threads share every operator they wait for each other at each, and read what another one has
written; two virtual processors may lie far apart for minutes (docs/decisions/0008).
Where each has rows of its own, nothing passes between them. A row's answer is its
own in all that this toolchain writes, so answers are the same.

That is slower where every thread has so few tokens that it waits for the weights, which each reads
by itself: a large model, many threads, short texts. So the first batches of each size, to a factor
of two, are run both ways and timed; the rest run by rows unless every one of them took less by
operators, with the same bits. So one input has one answer, whatever was measured.

What runs rows alone is a session of its own, of one thread, opened when the first batch comes that
is large enough: its weights are in memory a second time.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...inputs.batch import Array

Run = Callable[[Sequence[str], Mapping[str, Array]], list[Array]]
CALLERS = 64  # at the same time, of whom none waits for threads of another
RUNS = 5  # of a size, both ways; in the first the runtime plans its memory, and it does not count


@dataclass
class _Tried:
    """The first batches of one size. seconds: (by rows, by operators) of each."""

    seconds: list[tuple[float, float]] = field(default_factory=list)
    same: bool = True

    @property
    def by_operators(self) -> bool:
        """Whether the rest run so. Of two ways that are as fast, one in sixteen is taken for it."""
        return self.same and all(
            by_operators < by_rows for by_rows, by_operators in self.seconds[1:RUNS]
        )


class DividedRuns:
    """Of one model by `threads` threads, two or more, the caller's among them.

    opener: gives the session of one thread. together: runs a batch by operators, all threads on
    it; also what is left over when each thread has had as many rows. clock: in seconds.
    """

    def __init__(
        self,
        opener: Callable[[], Any],
        together: Run,
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._opener, self._together, self._threads = opener, together, threads
        self._clock, self._lock = clock, threading.Lock()
        self._tried: defaultdict[int, _Tried] = defaultdict(_Tried)
        self._session: Any = None
        self._others: ThreadPoolExecutor | None = None

    def run(self, outputs: Sequence[str], arrays: Mapping[str, Array]) -> list[Array]:
        """The outputs' values. arrays, and what is computed of them, have a row of each example
        along their first axis."""
        first = next(iter(arrays.values()))
        each = len(first) // self._threads
        if not each:
            return self._together(outputs, arrays)
        tried = self._tried[(len(first) * math.prod(first.shape[1:])).bit_length()]
        if len(tried.seconds) < RUNS:
            return self._both_ways(outputs, arrays, tried)
        return (self._together if tried.by_operators else self._by_rows)(outputs, arrays)

    def _both_ways(
        self, outputs: Sequence[str], arrays: Mapping[str, Array], tried: _Tried
    ) -> list[Array]:
        """The answers by rows. Batches of one size have rows of several lengths, so each is timed
        beside itself."""
        times = [self._clock()]
        values = self._by_rows(outputs, arrays)
        times.append(self._clock())
        others = self._together(outputs, arrays)
        times.append(self._clock())
        pairs = zip(values, others, strict=True)
        tried.same &= all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
        tried.seconds.append((times[1] - times[0], times[2] - times[1]))
        return values

    def close(self) -> None:
        if self._others is not None:
            self._others.shutdown()
        self._session = self._others = None

    def _by_rows(self, outputs: Sequence[str], arrays: Mapping[str, Array]) -> list[Array]:
        rows = len(next(iter(arrays.values())))
        each = rows // self._threads
        session, others = self._opened()
        shares = [_rows(arrays, i * each, (i + 1) * each) for i in range(self._threads)]
        futures = [others.submit(session.run, outputs, share) for share in shares[1:]]
        try:
            parts = [session.run(outputs, shares[0])]
        finally:
            wait(futures)
        parts += [future.result() for future in futures]
        if rows % self._threads:
            parts.append(self._together(outputs, _rows(arrays, self._threads * each, rows)))
        return [np.concatenate(values) for values in zip(*parts, strict=True)]

    def _opened(self) -> tuple[Any, ThreadPoolExecutor]:
        with self._lock:
            if self._session is None or self._others is None:
                self._session = self._opener()
                # started as they are needed: callers at the same time have others each
                self._others = ThreadPoolExecutor(CALLERS * (self._threads - 1), "rows")
            return self._session, self._others


def by_rows(session: Any) -> bool:
    """Whether all that the model takes and gives has one and the same first axis, of any size."""
    ports = [*session.get_inputs(), *session.get_outputs()]
    axes = {port.shape[0] if port.shape else None for port in ports}
    return len(axes) == 1 and isinstance(axes.pop(), str)


def _rows(arrays: Mapping[str, Array], first: int, last: int) -> dict[str, Array]:
    return {name: array[first:last] for name, array in arrays.items()}
