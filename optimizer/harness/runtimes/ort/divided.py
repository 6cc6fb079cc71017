"""A batch divided by rows among threads, in place of every operator among them.

    answers of rows 0..7 by two threads  =  answers of rows 0..3 beside answers of rows 4..7

Where threads share every operator they wait for each other at each, and read what another one has
written; two virtual processors may lie far apart for minutes (docs/decisions.md: A batch divided
among threads). Where each has rows of its own, nothing passes between them. A row's answer is its
own in all that this toolchain writes, so answers are the same.

What runs rows alone is a session of its own, of one thread, opened when the first batch comes that
is large enough: its weights are in memory a second time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from ...inputs.batch import Array

Run = Callable[[Sequence[str], Mapping[str, Array]], list[Array]]


class DividedRuns:
    """Of one model by `threads` threads, two or more, the caller's among them.

    opener: gives the session of one thread. together: runs what is left over when every thread has
    had as many rows, all threads on it.
    """

    def __init__(self, opener: Callable[[], Any], together: Run, threads: int) -> None:
        self._opener, self._together, self._threads = opener, together, threads
        self._lock = threading.Lock()
        self._session: Any = None
        self._others: ThreadPoolExecutor | None = None

    def run(self, outputs: Sequence[str], arrays: Mapping[str, Array]) -> list[Array]:
        """The outputs' values. arrays, and what is computed of them, have a row of each example
        along their first axis."""
        rows = len(next(iter(arrays.values())))
        each = rows // self._threads
        if not each:
            return self._together(outputs, arrays)
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

    def close(self) -> None:
        if self._others is not None:
            self._others.shutdown()
        self._session = self._others = None

    def _opened(self) -> tuple[Any, ThreadPoolExecutor]:
        with self._lock:
            if self._session is None or self._others is None:
                self._session = self._opener()
                self._others = ThreadPoolExecutor(self._threads - 1, "rows")
            return self._session, self._others


def by_rows(session: Any) -> bool:
    """Whether all that the model takes and gives has one and the same first axis, of any size."""
    ports = [*session.get_inputs(), *session.get_outputs()]
    axes = {port.shape[0] if port.shape else None for port in ports}
    return len(axes) == 1 and isinstance(axes.pop(), str)


def _rows(arrays: Mapping[str, Array], first: int, last: int) -> dict[str, Array]:
    return {name: array[first:last] for name, array in arrays.items()}
