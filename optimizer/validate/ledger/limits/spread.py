"""Limits measured in the run: how far correct runs lie from each other, and the bound that follows.

Of every two runs of monte_carlo.py the distance of every example of every output is taken; the
limit of an output is their tolerance bound (optimizer/foundation/rounding/tolerance.py).
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
    """Of each output, the median distance of two correct runs and the limit that follows."""

    runs: int
    unit: float
    medians: Mapping[str, float]
    limits: Mapping[str, float]

    def as_dict(self, measured: Mapping[str, float]) -> dict[str, Any]:
        """For the report. measured: the candidate's worst distance of each output."""
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
    """first and second: [run][trace]{name: array} of two kinds of runs; None: of one kind. traces:
    the reference's, whose real tokens count. examples: how many of each output will be judged."""
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
    """One per example, as the hops measure it."""
    pairs = [
        pair for x, y, one in zip(a, b, traces, strict=True) for pair in one.pairs(x[name], y[name])
    ]
    return lengths(pairs)


def against(
    limits: Mapping[str, float],
    results: Run,
    traces: Sequence[Trace],
    names: Sequence[str],
) -> tuple[Distance, dict[str, float], list[tuple[str, float, float]]]:
    """Everything measured, the worst example of each output, and (output, worst, limit) of those
    beyond their limit, the furthest first."""
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
