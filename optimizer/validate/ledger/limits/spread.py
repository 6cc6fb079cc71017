"""Derive limits from correct runs: the upper tolerance bound of the distances between each two of
them.

    runs (monte_carlo.py), reference traces -> Spread: {output: limit}

The bound is that of optimizer/foundation/rounding/tolerance.py, over every example of every
output. The runs are made of a sample of the texts, which may lack a text that rounding moves much
further than the others, such as four tokens of which one has a massive activation. So an example
beyond the limit is judged again, by correct runs of that example alone (`judge_alone`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import numpy as np

from optimizer.foundation.process import threads
from optimizer.foundation.rounding.tolerance import (
    CONFIDENCE,
    MISSED,
    Squares,
    compare_lengths,
    squares,
    upper_bound,
)
from optimizer.harness.runtimes.ort.run import cores
from optimizer.validate.ledger.distance import Array, Distance, measure_distance, merge
from optimizer.validate.ledger.trace import Trace

Run = Sequence[Mapping[str, Array]]


@dataclass(frozen=True)
class Spread:
    """The median distance of two correct runs and the resulting limit, by output.

    limit_alone: (trace of one example, output, usual mean square of the output's values) -> limit
        from correct runs of this example; None where they cannot be made
    """

    runs: int
    unit: float
    medians: Mapping[str, float]
    limits: Mapping[str, float]
    limit_alone: Callable[[Trace, str, float], float] | None = field(default=None, compare=False)

    def as_dict(self, measured: Mapping[str, float]) -> dict[str, Any]:
        """The report's `spread`. measured: the candidate's worst distance by output."""
        return {
            "runs": self.runs,
            "unit_roundoff": self.unit,
            "confidence": CONFIDENCE,
            "missed": MISSED,
            "outputs": {
                name: {
                    "median": self.medians[name],
                    "limit": limit,
                    "measured": measured.get(name, 0.0),
                }
                for name, limit in self.limits.items()
            },
        }


def measure_spread(
    first: Sequence[Run],
    second: Sequence[Run] | None,
    traces: Sequence[Trace],
    names: Mapping[str, Array | None] | Sequence[str],
    unit: float,
    examples: int,
) -> Spread:
    """Derive limits from the distances between each two runs.

    first: runs [run][trace]{name: array}
    second: runs of another kind, each compared with each of `first`; None: those of `first` are
        compared with each other
    traces: traces of the reference, whose real tokens count
    names: names of the outputs
    unit: unit roundoff of the runs
    examples: number of comparisons of each output with its limit
    """
    medians, limits = {}, {}
    pairs = list(product(first, second) if second is not None else combinations(first, 2))
    measured = threads.map_in_threads(lambda name: _distances(pairs, traces, name), names, cores())
    for name, distances in zip(names, measured, strict=True):
        apart = [d for each in distances for d in each]
        independent = max(len(apart) // max(len(pairs), 1), 1) * max(len(first) // 2, 1)
        medians[name] = float(np.median(apart)) if apart else 0.0
        limits[name] = upper_bound(apart, independent, examples * len(names), unit)
    return Spread(len(first), unit, medians, limits)


def _distances(
    pairs: Sequence[tuple[Run, Run]], traces: Sequence[Trace], name: str
) -> list[list[float]]:
    """Measure the distance of each example in each pair of runs, as the hops do: [pair][example].
    Two arrays are in memory at a time, and consecutive pairs share the first."""
    each: list[list[Squares]] = [[] for _ in pairs]
    for i, one in enumerate(traces):
        last: Run | None = None
        for (a, b), of_pair in zip(pairs, each, strict=True):
            if a is not last:
                last, x = a, a[i][name]
            of_pair += [squares(*pair) for pair in one.pairs(x, b[i][name])]
    return [compare_lengths(of_pair) for of_pair in each]


@dataclass(frozen=True)
class Alone:
    """Examples of an output beyond the limit of the sample, each within that of its own runs.

    examples: number of them
    others: largest distance of the other examples
    distance, limit: those of the example that is furthest from the expected values
    """

    examples: int
    others: float
    distance: float
    limit: float


def judge_alone(spread: Spread, results: Run, traces: Sequence[Trace], name: str) -> Alone | None:
    """Judge the examples of output `name` that exceed the limit of the sample by correct runs of
    these examples alone, the furthest first. Return None where one exceeds its own limit too, or
    cannot be run alone.

    results: outputs of the hop, per trace
    """
    examples: list[tuple[Squares, Trace, int]] = []
    for result, one in zip(results, traces, strict=True):
        actual, expected = result[name], one.result[name]
        if spread.limit_alone is None or actual.size != expected.size:
            return None
        pairs = one.pairs(actual, expected)
        rows = zip(pairs, one.rows(expected), strict=True)
        examples += [(squares(*pair), one, row) for pair, row in rows]
    assert spread.limit_alone is not None
    each = [s for s, _, _ in examples]
    usual = sum(norm for _, norm, _ in each) / max(sum(size for _, _, size in each), 1)
    distances = compare_lengths(each, usual)
    order = sorted(range(len(examples)), key=lambda i: -distances[i])
    beyond = [i for i in order if not distances[i] <= spread.limits[name]]
    limits = []
    for i in beyond:
        _, one, row = examples[i]
        limits.append(spread.limit_alone(one.alone(row), name, usual))
        if not distances[i] <= limits[-1]:
            return None
    others = max((distances[i] for i in order[len(beyond) :]), default=0.0)
    return Alone(len(beyond), others, distances[beyond[0]], limits[0])


def compare_runs(
    limits: Mapping[str, float], results: Run, traces: Sequence[Trace], names: Sequence[str]
) -> tuple[Distance, dict[str, float], list[tuple[str, float, float]]]:
    """Compare the outputs of a hop with the traces that it expects: (distance over all outputs,
    {output: distance of its worst example}, [(output, worst distance, limit)] of outputs beyond
    their limits, the furthest first).

    limits: {output: limit}
    results: outputs of the hop, per trace
    """

    def measure(name: str) -> Distance:
        return measure_distance(
            pair
            for result, one in zip(results, traces, strict=True)
            for pair in one.pairs(result[name], one.result[name])
        )

    each = dict(zip(names, threads.map_in_threads(measure, names, cores()), strict=True))
    worst = {name: d.worst for name, d in each.items()}
    beyond = [(n, w, limits[n]) for n, w in worst.items() if not w <= limits[n]]
    beyond.sort(key=lambda row: -row[1] / max(row[2], 1e-300))
    return merge(each.values()), worst, beyond
