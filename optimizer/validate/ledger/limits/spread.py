"""Derive limits from correct runs: the upper tolerance bound of the distances between each two of
them.

    runs (monte_carlo.py), reference traces -> Spread: {output: limit}

The bound is that of optimizer/foundation/rounding/tolerance.py, over every example of every
output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimizer.foundation.rounding.tolerance import CONFIDENCE, MISSED, lengths, upper_bound
from optimizer.validate.ledger.distance import Array, Distance, distance, merged
from optimizer.validate.ledger.trace import Trace

Run = Sequence[Mapping[str, Array]]


@dataclass(frozen=True)
class Spread:
    """The median distance of two correct runs and the resulting limit, by output."""

    runs: int
    unit: float
    medians: Mapping[str, float]
    limits: Mapping[str, float]

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


def spread(
    first: Sequence[Run],
    second: Sequence[Run] | None,
    traces: Sequence[Trace],
    names: Mapping[str, Array | None] | Sequence[str],
    unit: float,
    examples: int,
) -> Spread:
    """Limits from the distances of each two runs.

    first, second: [run][trace]{name: array} of two kinds of runs; second None for one kind
    traces: the reference's, whose real tokens count
    examples: number of comparisons of each output with its limit
    """
    medians, limits = {}, {}
    others = first if second is None else second
    pairs = [
        (a, b)
        for i, a in enumerate(first)
        for j, b in enumerate(others)
        if second is not None or i < j
    ]
    for name in names:
        apart = [d for a, b in pairs for d in _distances(a, b, traces, name)]
        independent = max(len(apart) // max(len(pairs), 1), 1) * max(len(first) // 2, 1)
        medians[name] = float(np.median(apart)) if apart else 0.0
        limits[name] = upper_bound(apart, independent, examples * len(names), unit)
    return Spread(len(first), unit, medians, limits)


def _distances(a: Run, b: Run, traces: Sequence[Trace], name: str) -> list[float]:
    """The distance of each example, as the hops measure it."""
    together = zip(a, b, traces, strict=True)
    return lengths(pair for x, y, one in together for pair in one.pairs(x[name], y[name]))


def against(
    limits: Mapping[str, float], results: Run, traces: Sequence[Trace], names: Sequence[str]
) -> tuple[Distance, dict[str, float], list[tuple[str, float, float]]]:
    """(distance over all outputs, {output: its worst example}, [(output, worst, limit)] of outputs
    beyond their limits, the furthest first)."""
    each: dict[str, Distance] = {}
    for name in names:
        each[name] = distance(
            pair
            for result, one in zip(results, traces, strict=True)
            for pair in one.pairs(result[name], one.result[name])
        )
    worst = {name: d.worst for name, d in each.items()}
    beyond = [(n, w, limits[n]) for n, w in worst.items() if not w <= limits[n]]
    beyond.sort(key=lambda row: -row[1] / max(row[2], 1e-300))
    return merged(each.values()), worst, beyond
