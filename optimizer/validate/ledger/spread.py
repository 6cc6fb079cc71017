"""Limits measured in the run: how far correct runs lie from each other, and the bound that follows.

Of every two runs of monte_carlo.py the distance of every example of every output is taken. Their
logarithms are about normal; the limit of an output is the one-sided tolerance bound of that
population (Natrella 1963, Experimental Statistics, 2-15): with confidence CONFIDENCE it lies above
all but a share MISSED / looks of it, where `looks` is how many distances are held against limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from optimizer.validate.ledger.distance import Array, Distance, distance, lengths, merged
from optimizer.validate.ledger.trace import Trace

RUNS = 4
CONFIDENCE = 0.99
MISSED = 1e-4
"""The chance that a correct run is refused by all limits of one hop together."""

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


def upper_bound(values: Sequence[float], independent: int, looks: int, unit: float) -> float:
    """Above all but MISSED / looks of the population of `values`, of which so many are independent;
    never below one roundoff."""
    logs = np.log(np.maximum(np.asarray(values, np.float64), unit * 1e-3))
    if len(logs) < 3 or not np.isfinite(logs).all():
        return math.inf  # too few to know how they scatter
    factor = tolerance_factor(max(independent, 3), 1 - MISSED / max(looks, 1))
    return max(unit, math.exp(float(logs.mean()) + factor * float(logs.std(ddof=1))))


def normal_bound(values: Sequence[float], looks: int) -> float:
    """As upper_bound, of values that are about normal themselves: shares of a whole, which lie
    within bounds of their own."""
    if len(values) < 3:
        return math.inf
    factor = tolerance_factor(len(values), 1 - MISSED / max(looks, 1))
    return float(np.mean(values)) + factor * float(np.std(values, ddof=1))


def tolerance_factor(values: int, share: float) -> float:
    """How many standard deviations above the mean of `values` normal values the bound of `share` of
    their population lies, with CONFIDENCE."""
    normal = NormalDist()
    z, sure = normal.inv_cdf(share), normal.inv_cdf(CONFIDENCE)
    a = 1 - sure**2 / (2 * (values - 1))
    if a <= 0.1:  # too few values for the approximation
        return 10 * z
    return (z + math.sqrt(z**2 - a * (z**2 - sure**2 / values))) / a


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
