"""Permutation test of two histograms, and its least distance that counts.

    distance  of ordered bins the largest difference of the two cumulative shares (Kolmogorov and
              Smirnov); of names half the sum of the differences of shares (total variation)
    p         share of random divisions of all observations into two samples of these sizes with a
              distance at least as large; exact but for the number of divisions, whatever the bins

fail            p is at most alpha, and the distance at least `least`
inconclusive    p is above alpha, and only distances above `least` would have had a lower p; or a
                sample of n rows is so small that it misses a bin with a share of `least` with
                probability (1 - least)^n above alpha, as where all rows are equal
pass            else: a distance of `least` would have been significant, or the one that is
                significant is smaller
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimizer.foundation.verdicts import Verdict

DIVISIONS = 9_999  # a choice: an error of p of 0.002 at p = 0.05, one standard deviation
SMALLEST = 1 / (1 + DIVISIONS)  # least p
MOST = 10**8  # observations of a sample beyond which its shares are as good as known
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class DriftResult:
    """Result of the test that compares two samples of requests.

    distance: distance of the two histograms, 0 to 1
    p: probability of a distance at least as large if both samples have one distribution
    needed: observations of the first sample at which a difference of `least` would be significant;
        None if the second sample is too small for any number
    """

    distance: float
    p: float
    verdict: Verdict
    needed: int | None


def compare(
    first: Mapping[Any, int],
    second: Mapping[Any, int],
    *,
    ordered: bool,
    alpha: float,
    least: float,
    seed: int = 0,
) -> DriftResult:
    """Test if two histograms of requests {bin: number of observations}, neither empty, differ.

    ordered: True where bins are numbers, False where they are names
    alpha: significance level
    least: least distance that counts
    seed: seed of the random divisions
    """
    bins = sorted({*first, *second})
    counts = np.array([[_capped(side, name) for name in bins] for side in (first, second)])
    pooled, sizes = counts.sum(0), counts.sum(1)
    random = np.random.default_rng(seed)
    drawn = random.multivariate_hypergeometric(pooled, int(sizes[0]), DIVISIONS, method="marginals")
    distances = _distance(drawn / sizes[0], (pooled - drawn) / sizes[1], ordered)
    distance = float(_distance(counts[0] / sizes[0], counts[1] / sizes[1], ordered))
    rounding = 1e-12
    p = (1 + int((distances >= distance - rounding).sum())) / (1 + DIVISIONS)
    critical = float(np.quantile(distances, 1 - alpha, method="higher"))
    verdict: Verdict = "pass"
    if p <= alpha:
        verdict = "fail" if distance >= least else "pass"
    elif critical > least or sizes.min() < fewest(alpha, least):
        verdict = "inconclusive"
    needed = None if sizes[1] < fewest(alpha, least) else _needed(critical, sizes, least)
    return DriftResult(distance, p, verdict, needed and max(needed, fewest(alpha, least)))


def fewest(alpha: float, least: float) -> int:
    """Return how many rows of users' requests a test of drift needs: the fewest that miss a bin
    with a share of `least` with at most probability alpha: the smallest n with (1 - least)^n <=
    alpha."""
    return math.ceil(math.log(alpha) / math.log1p(-least))


def _capped(side: Mapping[Any, int], name: Any) -> int:
    total = sum(side.values())
    return side.get(name, 0) if total <= MOST else side.get(name, 0) * MOST // total


def _distance(a: Floats, b: Floats, ordered: bool) -> Floats:
    """Return the distance of two samples of requests, arrays of shares (..., bins), along the last
    axis."""
    if ordered:
        return np.abs(np.cumsum(a - b, -1)).max(-1)  # type: ignore[no-any-return]
    return np.abs(a - b).sum(-1) / 2  # type: ignore[no-any-return]


def _needed(critical: float, sizes: Any, least: float) -> int | None:
    """Return the number of users' requests at which the critical distance is `least`; None if no
    size suffices.

    The critical distance shrinks with the root of 1 / n + 1 / m. sizes: (n, m) now
    """
    spread = critical**2 / float((1 / sizes).sum())
    rest = least**2 / spread - 1 / float(sizes[1]) if spread else 1.0
    return math.ceil(1 / rest) if rest > 0 else None
