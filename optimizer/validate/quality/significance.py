"""Decide if the candidate is worse than its baseline by less than the margin: paired tests.

drop = baseline value - candidate value, on the same examples. With alpha = 1 - confidence:

    pass           "the drop is at least the margin" is rejected at level alpha
    fail           "the drop is at most the margin" is rejected at level alpha
    inconclusive   neither; `needed`: number of examples that would probably decide

So a candidate whose true drop is the margin or more passes with probability at most alpha, and
one whose true drop is the margin or less fails with probability at most alpha. `interval` is the
two one-sided bounds, a two-sided interval at 1 - 2 alpha.

Right/wrong outcomes use the exact test of harness/server/versions/paired_test.py, which servers use
as well. Means over many tokens (perplexity) use Student's t and Hall's transformation of it (1992,
JRSS B 54, 221-228), which corrects for skewness; the more cautious of the two decides. Everything
else uses the bias-corrected accelerated bootstrap (Efron 1987, JASA 82, 171-185) with the
small-sample expansion of Hesterberg (2015, The American Statistician 69, 371-386).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from optimizer.foundation.verdicts import Verdict
from optimizer.harness.server.versions.paired_test import Floats, judge_exactly, p_value

__all__ = ["Floats", "Verdict", "judge_exactly"]

WeightedDrop = Callable[[Floats], Floats]

FEWEST_WINDOWS = 20  # examples, for an estimate of their skewness
FEWEST_RESAMPLED = 50  # examples, for a bootstrap's tails
CAUTION = 0.6  # approximate bounds are read at this share of alpha: at alpha they err in up to 7 %
SMALLEST_TAIL = 1e-12  # of a bootstrap; that of very few examples rounds to 0, without a quantile
POWER = 0.8  # probability with which `needed` examples decide
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Decision:
    """Result of a paired test.

    drop: estimate
    needed: total number of examples that would probably decide; None: decided already, or no
        number would (the drop equals the margin)
    """

    verdict: Verdict
    drop: float
    interval: tuple[float, float]
    margin: float
    confidence: float
    examples: int
    needed: int | None


def decide_by_outcomes(
    baseline: npt.NDArray[np.bool_],
    candidate: npt.NDArray[np.bool_],
    margin: float,
    confidence: float,
) -> Decision:
    """Decide by the exact paired test of right/wrong outcomes.

    baseline, candidate: (examples,), True where the answer is right
    margin: largest accepted drop
    confidence: 1 - alpha of the test
    """
    lost = int((baseline & ~candidate).sum())
    won = int((~baseline & candidate).sum())
    return decide_by_counts(lost, won, len(baseline), margin, confidence)


def decide_by_counts(
    lost: int, won: int, examples: int, margin: float, confidence: float
) -> Decision:
    """Decide by the exact paired test of counts.

    lost: number of examples that only the baseline answers right
    won: number of examples that only the candidate answers right
    examples: number of all examples
    """
    alpha = 1 - confidence
    verdict = judge_exactly(lost, won, examples, margin, alpha)
    drop = (lost - won) / examples
    upper = _bound(lost, won, examples, alpha)
    lower = -_bound(won, lost, examples, alpha)
    needed = None
    if verdict == "inconclusive":
        spread = math.sqrt(max((lost + won) / examples - drop * drop, 0.0))
        never_seen = math.log(alpha) / math.log1p(-margin)  # enough without a disagreement
        needed = count_examples_needed(drop, spread, margin, alpha, examples, math.ceil(never_seen))
    return Decision(verdict, drop, (lower, upper), margin, confidence, examples, needed)


def _bound(lost: int, won: int, examples: int, alpha: float) -> float:
    """Return the upper confidence bound of the candidate's drop: the smallest drop that the data
    reject."""
    rejected, accepted = 1.0, (lost - won) / examples
    while rejected - accepted > 2e-5:
        # Most of [-1, 1] is far away: step out from the estimate before bisection.
        step = 4 / math.sqrt(examples) / 10
        middle = (rejected + accepted) / 2
        middle = min(middle, accepted + step) if rejected == 1.0 else middle
        if middle < 1 and p_value(lost, won, examples, middle, alpha) > alpha:
            accepted = middle
        else:
            rejected = middle
    return rejected


def count_examples_needed(
    drop: float, spread: float, margin: float, alpha: float, examples: int, at_least: int = 0
) -> int | None:
    """Number of examples that decide with probability POWER if the estimates are right.

    n = ((z_alpha + z_power) spread / (margin - drop))^2, the normal approximation; spread is the
    standard deviation of one example's contribution to the drop. None above a hundred million,
    where drop and margin cannot be told apart.
    """
    z = _NORMAL.inv_cdf(1 - alpha) + _NORMAL.inv_cdf(POWER)
    distance = abs(margin - drop)
    if distance * 1e4 <= spread * z:
        return None
    return max(math.ceil((z * spread / distance) ** 2), at_least, examples + 1)


def decide_by_mean(drops: Floats, margin: float, confidence: float) -> Decision:
    """Decide by the mean of one drop per example (examples,), each itself a mean of many values.

    Fewer than FEWEST_WINDOWS examples are inconclusive. In simulations at the margin with 20 or
    more examples it errs in at most alpha for normal, Student's t(4), gamma(4), exponential and
    mildly lognormal drops (log-deviation 0.5; in 9 % at 1.0). It errs more often where examples
    depend on each other, such as windows of one text.
    """
    examples, alpha = len(drops), 1 - confidence
    mean = float(drops.mean())
    lower, upper = bound_mean(drops, CAUTION * alpha)
    verdict: Verdict = "inconclusive"
    if examples >= FEWEST_WINDOWS:
        verdict = "pass" if upper < margin else "fail" if lower > margin else "inconclusive"
    needed = None
    if verdict == "inconclusive":
        spread = float(drops.std(ddof=1)) if examples > 1 else 0.0
        least = FEWEST_WINDOWS
        needed = count_examples_needed(mean, spread, margin, CAUTION * alpha, examples, least)
    return Decision(verdict, mean, (lower, upper), margin, confidence, examples, needed)


def bound_mean(values: Floats, tail: float) -> tuple[float, float]:
    """(lower, upper) bounds of a mean, each missed with probability `tail` (approximately).

    Student's (m - q s / sqrt(n)), and the inverse of Hall's cubic at the same quantile:
    g(W) = W + k W^2 / 3 + k^2 W^3 / 27 + k / (6 n), W = (m - mean) / s, k the skewness.
    """
    n, mean = len(values), float(values.mean())
    if n < 2:
        return -math.inf, math.inf
    spread = float(values.std(ddof=1))
    if spread == 0:
        return mean, mean
    skewness = float(((values - mean) ** 3).mean()) / float(values.std()) ** 3

    def bound(z: float) -> float:
        away = student(z, n - 1) / math.sqrt(n)
        if abs(skewness) < 1e-6:
            return mean - spread * away
        inner = 1 + skewness * (away - skewness / (6 * n))
        return mean - spread * 3 / skewness * (float(np.cbrt(inner)) - 1)

    z = _NORMAL.inv_cdf(1 - tail)
    reach = spread * student(z, n - 1) / math.sqrt(n)
    return min(mean - reach, bound(z)), max(mean + reach, bound(-z))


def student(z: float, freedom: int) -> float:
    """Return Student's quantile at the normal quantile z, by the Cornish-Fisher expansion: exact to
    1e-4 from 30 degrees of freedom."""
    df = max(freedom, 1)
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)


@dataclass(frozen=True)
class Draws:
    """Number and seed of a bootstrap's resamples."""

    seed: int = 0
    resamples: int = 4000


DRAWS = Draws()


def decide_by_bootstrap(
    drop: WeightedDrop,
    examples: int,
    margin: float,
    confidence: float,
    draws: Draws = DRAWS,
    imagined: tuple[WeightedDrop, WeightedDrop] | None = None,
) -> Decision:
    """Decide by the BCa bootstrap of any statistic. Fewer than FEWEST_RESAMPLED examples are
    inconclusive.

    drop: weights (rows, examples) -> drop of each row's weighted data set (rows,); whole-number
        weights are a resample, all ones the data
    imagined: drop with added examples that are lost, and with some that are won; the bounds are
        taken from these, because a resample has no more disagreements than the data (the role of
        x + 1 in Clopper and Pearson's bound)
    """
    alpha = 1 - confidence
    estimate = float(drop(np.ones((1, examples)))[0])
    tail = expand_alpha(CAUTION * alpha, examples)

    def replicate(statistic: WeightedDrop) -> tuple[Floats, float, Floats]:
        replicates = resample(statistic, examples, draws.seed, draws.resamples)
        centre = float(statistic(np.ones((1, examples)))[0])
        return replicates, centre, leave_one_out(statistic, examples)

    lost, won = imagined or (drop, drop)
    of_lost = replicate(lost)
    of_won = of_lost if won is lost else replicate(won)
    lower, upper = bca_bound(*of_won, tail), bca_bound(*of_lost, 1 - tail)
    verdict: Verdict = "inconclusive"
    if examples >= FEWEST_RESAMPLED:
        verdict = "pass" if upper < margin else "fail" if lower > margin else "inconclusive"
    needed = None
    if verdict == "inconclusive":
        jackknife = of_lost[2] if lost is drop else leave_one_out(drop, examples)
        spread = float(np.std(jackknife)) * (examples - 1)
        reach = upper - estimate if estimate < margin else estimate - lower
        centre = float((lost if estimate < margin else won)(np.ones((1, examples)))[0])
        power = _NORMAL.inv_cdf(POWER) * spread / math.sqrt(examples)
        times = _times_needed(reach + power, abs(centre - estimate), abs(margin - estimate))
        least = max(FEWEST_RESAMPLED, math.ceil(times * examples))
        needed = count_examples_needed(estimate, spread, margin, alpha, examples, least)
    return Decision(verdict, estimate, (lower, upper), margin, confidence, examples, needed)


def _times_needed(reach: float, shift: float, distance: float) -> float:
    """Return by which factor the number of examples must grow until a bound comes within `distance`
    of its limit.

    reach: distance of the bound from the estimate
    shift: part of it that imagined examples cause, which falls as 1 / n; the rest falls as 1 /
        sqrt(n)
    """
    rest = reach - shift
    root = (rest + math.sqrt(rest**2 + 4 * shift * distance)) / max(2 * distance, SMALLEST_TAIL)
    return root**2


def resample(drop: WeightedDrop, examples: int, seed: int, resamples: int) -> Floats:
    """Compute the statistic (resamples,) of random resamples, in pieces of at most four million
    weights.

    drop: function weights (rows, examples) -> statistic (rows,)
    """
    generator = np.random.default_rng(seed)
    even = np.full(examples, 1 / examples)
    piece = max(1, 4_000_000 // examples)
    parts = [
        drop(generator.multinomial(examples, even, min(piece, resamples - done)).astype(np.float64))
        for done in range(0, resamples, piece)
    ]
    return np.concatenate(parts)


def leave_one_out(drop: WeightedDrop, examples: int) -> Floats:
    """Compute the statistic (examples,) without each example in turn.

    drop: function weights (rows, examples) -> statistic (rows,)
    """
    piece = max(1, 4_000_000 // examples)
    parts = []
    for start in range(0, examples, piece):
        rows = np.arange(start, min(start + piece, examples))
        weights = np.ones((len(rows), examples))
        weights[np.arange(len(rows)), rows] = 0
        parts.append(drop(weights))
    return np.concatenate(parts)


def expand_alpha(alpha: float, examples: int) -> float:
    """Tail at which a bootstrap is read so that its error is alpha at small sizes too.

    Phi(-sqrt(n / (n - 1)) t(1 - alpha, n - 1)): a bootstrap's spread is too small by
    sqrt((n - 1) / n), and its tails are normal instead of Student's.
    """
    df = max(examples - 1, 1)
    t = student(_NORMAL.inv_cdf(1 - alpha), df)
    return max(_NORMAL.cdf(-math.sqrt((df + 1) / df) * t), SMALLEST_TAIL)


def bca_bound(replicates: Floats, estimate: float, jackknife: Floats, tail: float) -> float:
    """Return the bias-corrected, accelerated quantile of the replicates at `tail`.

    replicates: statistic of each resample
    estimate: statistic of the data
    jackknife: result of leave_one_out
    """
    below = (replicates < estimate).mean() + (replicates == estimate).mean() / 2
    if not 0 < below < 1 or replicates.min() == replicates.max():
        return float(np.quantile(replicates, tail))
    bias = _NORMAL.inv_cdf(float(below))
    influence = jackknife.mean() - jackknife
    cubes, squares = float((influence**3).sum()), float((influence**2).sum())
    acceleration = cubes / (6 * squares**1.5) if squares > 0 else 0.0
    z = bias + _NORMAL.inv_cdf(tail)
    shifted = _NORMAL.cdf(bias + z / (1 - acceleration * z))
    return float(np.quantile(replicates, min(max(shifted, 0.0), 1.0)))
