"""Latency model of batches, measured on this machine: fixed + per_row * rows for each length."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

REPEATS = 3  # maximum runs of each shape; the median counts
ENOUGH = 1.0  # seconds of a shape's runs after which no further one is timed


@dataclass(frozen=True)
class LatencyLine:
    """Prediction, for a server's scheduler, of the seconds of a batch of one length: fixed +
    per_row * rows, both at least 0."""

    fixed: float
    per_row: float

    def seconds(self, rows: int) -> float:
        return self.fixed + self.per_row * rows


@dataclass(frozen=True)
class LatencyModel:
    """Prediction, for a server's scheduler, of the seconds of a batch by length and rows: a
    LatencyLine for each measured length, ascending.

    Between two lengths it interpolates linearly; below the smallest it is constant, above the
    largest proportional to the length.
    """

    lengths: tuple[int, ...]
    lines: tuple[LatencyLine, ...]

    def seconds(self, length: int, rows: int) -> float:
        """Predict for the scheduler the seconds of a batch; never less for more rows."""
        at = bisect_left(self.lengths, length)
        if at == len(self.lengths):
            return self.lines[-1].seconds(rows) * length / self.lengths[-1]
        above = self.lines[at].seconds(rows)
        if at == 0 or self.lengths[at] == length:
            return above
        below, low, high = self.lines[at - 1].seconds(rows), *self.lengths[at - 1 : at + 1]
        return below + (above - below) * (length - low) / (high - low)


def fit_line(seconds: Sequence[tuple[int, float]]) -> LatencyLine:
    """Fit in a server's warm-up a LatencyLine through (rows, seconds) by least squares, with both
    parts at least 0.

    A batch then never costs more than its rows alone, and more rows never cost less. Raises
    ValueError without a measurement.
    """
    if not seconds:
        raise ValueError("no batch was timed")
    count = len(seconds)
    mean_rows = sum(rows for rows, _ in seconds) / count
    mean_time = sum(time for _, time in seconds) / count
    spread = sum((rows - mean_rows) ** 2 for rows, _ in seconds)
    if spread == 0:
        return LatencyLine(0.0, mean_time / mean_rows)
    slope = sum((rows - mean_rows) * (t - mean_time) for rows, t in seconds) / spread
    slope = max(slope, 0.0)
    fixed = mean_time - slope * mean_rows
    if fixed < 0:  # then through the origin
        return LatencyLine(0.0, sum(r * t for r, t in seconds) / sum(r * r for r, _ in seconds))
    return LatencyLine(fixed, slope)


def measure_latency(
    run: Callable[[int, int], object],
    lengths: Sequence[int],
    rows: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int], None] = lambda _: None,
) -> LatencyModel:
    """Time in a server's warm-up run(length, rows) for every pair of a length and a number of rows.

    run: function that runs a batch; each shape was run before, because a runtime plans its memory
        in the first run
    lengths: lengths in ascending order
    progress: function that is called with each length before it is timed
    """
    lines = []
    for length in lengths:
        progress(length)
        points = []
        for count in rows:
            times: list[float] = []
            while len(times) < REPEATS and sum(times) < ENOUGH:
                start = clock()
                run(length, count)
                times.append(clock() - start)
            points.append((count, median(times)))
        lines.append(fit_line(points))
    return LatencyModel(tuple(lengths), tuple(lines))
