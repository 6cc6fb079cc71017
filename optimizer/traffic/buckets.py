"""Choose shape buckets: lengths to which rows are padded, at the least expected cost.

A row of length l goes to the shortest bucket e >= l, and costs cost(e). For rows in sorted order
l_1 < ... < l_n with weights w_i, the best k buckets of the first j lengths cost

    C(k, j) = min over i < j of  C(k - 1, i) + (w_{i+1} + ... + w_j) cost(l_j)

because the buckets of an optimum lie at lengths that occur. Exact, by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.foundation.errors import DataError

MULTIPLE = 8  # matrix units take lengths in multiples of it
MOST_LENGTHS = 1024  # beyond them lengths are rounded up further; a choice
Cost = Callable[[int], float]


@dataclass(frozen=True)
class Buckets:
    """Optimal lengths, for users' requests, to pad rows to, for one number of buckets.

    lengths: bucket lengths in tokens, ascending
    cost: expected cost of a row, divided by its cost without padding
    """

    lengths: tuple[int, ...]
    cost: float


def choose(lengths: Mapping[int, float], cost: Cost, most: int, longest: int) -> list[Buckets]:
    """Choose the lengths to pad users' requests to: the best 1, 2, ... up to `most` buckets; fewer
    where there are fewer lengths.

    lengths: {tokens of a row: number of rows}
    cost: cost of a row that is padded to this length
    longest: length of the last bucket; not below the longest row
    """
    weights: dict[int, float] = {longest: 0.0}
    multiple = max(MULTIPLE, -(-longest // MOST_LENGTHS))
    for length, number in lengths.items():
        rounded = min(-(-length // multiple) * multiple, longest)
        weights[rounded] = weights.get(rounded, 0.0) + number
    ends = sorted(weights)
    # a shorter row is not dearer, whatever noise the times have
    every = sorted({*lengths, *ends})
    cost_of = dict(zip(every, np.maximum.accumulate([cost(n) for n in every]), strict=True))
    costs = np.array([cost_of[end] for end in ends])
    bare = float(sum(number * cost_of[n] for n, number in lengths.items()))
    before = np.cumsum([0.0, *(weights[end] for end in ends)])
    best = before[1:] * costs  # one bucket for the first j lengths
    chosen = [[0] * len(ends)]  # of each number of buckets: lengths before the last bucket
    choices = [Buckets((ends[-1],), float(best[-1]) / bare)]
    for _ in range(min(most, len(ends)) - 1):
        steps = [
            best[:j] + (before[j + 1] - before[1 : j + 1]) * costs[j] for j in range(len(ends))
        ]
        best = np.array([min(step, default=np.inf) for step in steps])
        chosen.append([int(step.argmin()) + 1 if step.size else 0 for step in steps])
        choices.append(Buckets(_trace(chosen, ends), float(best[-1]) / bare))
    return choices


def _trace(chosen: Sequence[Sequence[int]], ends: Sequence[int]) -> tuple[int, ...]:
    """Read the lengths chosen for the requests back from the dynamic program, the last one
    first."""
    picked, j = list[int](), len(ends) - 1
    for before in reversed(chosen):
        picked.append(ends[j])
        j = before[j] - 1
    return tuple(reversed(picked))


def interpolate_times(cells: Sequence[Mapping[str, float]], batch: int, where: str) -> Cost:
    """Return a function from the length of a request's row in tokens to its cost, interpolated from
    measured times.

    Times are those of the largest measured batch up to `batch`, divided by that batch; linear
    between two lengths, constant below the shortest. The function raises DataError beyond the
    longest.

    cells: {"batch", "sequence", "p50" in ms} per measured shape
    batch: rows per run of the model
    where: name of the file, for messages
    """
    sizes = sorted({int(cell["batch"]) for cell in cells})
    nearest = max((size for size in sizes if size <= batch), default=sizes[0])
    at = sorted((int(c["sequence"]), float(c["p50"])) for c in cells if c["batch"] == nearest)
    sequences, times = zip(*at, strict=True)

    def cost(length: int) -> float:
        if length > sequences[-1]:
            raise DataError(
                f"times are known up to {sequences[-1]} tokens at batch {nearest}, and a bucket "
                f"of {length} is needed",
                where=where,
                fix=f"Measure again with --sequence {length}.",
            )
        return float(np.interp(length, sequences, times)) / nearest

    return cost
