"""Divide a batch among threads by rows, instead of dividing every operator.

    outputs of rows 0..7 by two threads  =  outputs of rows 0..3, outputs of rows 4..7

Threads that share an operator synchronize at each one and read each other's results, which is slow
where processors are far apart (docs/decisions/0008). Threads with
separate rows exchange nothing. A row's outputs do not depend on other rows in models of this
toolchain, so outputs are equal.

Division by rows is slower if each thread has too few tokens to amortize reading all weights: a
large model, many threads, short texts. So the first RUNS batches of each size (to a factor of two)
run both ways and are timed. Later batches run by rows, unless each timed batch was faster by
operators and gave the same bits. So measurements never change an answer.

Rows run in a second session with one thread, which is opened at the first large batch and holds the
weights in memory a second time.
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
CALLERS = 64  # concurrent callers that have threads of their own
RUNS = 5  # batches per size that run both ways; the first is warm-up and does not count


@dataclass
class _Tried:
    """Timing of the first batches of one size in ONNX Runtime, whole and divided.

    seconds: (by rows, by operators) of each batch
    same: True if both ways gave equal bits in every batch
    """

    seconds: list[tuple[float, float]] = field(default_factory=list)
    same: bool = True

    @property
    def by_operators(self) -> bool:
        """Return True if later batches of this size run whole in ONNX Runtime, with threads inside
        each operator.

        With both ways equally fast this happens with a chance of 1 in 16.
        """
        return self.same and all(
            by_operators < by_rows for by_rows, by_operators in self.seconds[1:RUNS]
        )


class DividedRuns:
    """Runs of one model in ONNX Runtime that divide a batch's rows among threads, the caller's
    included.

    opener: function that opens a session with one thread
    together: function that runs a batch by operators on all threads; it also runs the rows that
        remain after an even division
    threads: number of threads, at least 2
    clock: clock in seconds
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
        """Run a batch in ONNX Runtime, whole or divided among threads by rows, and return the
        outputs. The first axis of all arrays is the rows."""
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
        """Run a batch in ONNX Runtime whole and divided by rows, record both times, and return the
        outputs of the divided run."""
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
        """Divide a batch by rows among threads of ONNX Runtime, run the parts, and return the
        concatenated outputs."""
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
                # threads start on demand; concurrent callers use different ones
                self._others = ThreadPoolExecutor(CALLERS * (self._threads - 1), "rows")
            return self._session, self._others


def can_divide_rows(session: Any) -> bool:
    """Test, to divide a batch by rows, that all inputs and outputs of the session share one dynamic
    first axis."""
    ports = [*session.get_inputs(), *session.get_outputs()]
    axes = {port.shape[0] if port.shape else None for port in ports}
    return len(axes) == 1 and isinstance(axes.pop(), str)


def _rows(arrays: Mapping[str, Array], first: int, last: int) -> dict[str, Array]:
    """Cut rows first..last out of each array of a batch, for one thread."""
    return {name: array[first:last] for name, array in arrays.items()}
