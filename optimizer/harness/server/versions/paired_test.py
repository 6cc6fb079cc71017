"""Exact non-inferiority test of a candidate against its baseline, on paired right/wrong outcomes.

Unconditional test of Tango's score statistic (1998, Statistics in Medicine 17, 891-908), maximised
over the unknown rate of disagreement (Berger and Boos 1994, JASA 89, 1012-1016). The score interval
itself is not used because it is not exact: with 900 examples, a margin of 0.01 and no recoveries it
passes 5.5 % of boundary cases. Used by the accuracy gates (validate/quality/significance.py) and by
trial.py.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Verdict = Literal["pass", "fail", "inconclusive"]

NUISANCE_POINTS = 17
MISSED = 0.02  # share of alpha spent on the disagreement rate lying outside its interval


def judge_exactly(lost: int, won: int, examples: int, margin: float, alpha: float) -> Verdict:
    """Judge the drop in accuracy, (lost - won) / examples, of a new version under trial against a
    margin.

    lost, won: numbers of examples that only the baseline, or only the candidate, gets right

    Returns "pass" if the drop is below `margin`, "fail" if above, each with an error probability of
    at most alpha; else "inconclusive".
    """
    if p_value(lost, won, examples, margin, alpha) <= alpha:
        return "pass"
    if p_value(won, lost, examples, -margin, alpha) <= alpha:
        return "fail"
    return "inconclusive"


def score(lost: Floats, won: Floats, examples: int, drop: float) -> Floats:
    """Return, for a paired test of two models, Tango's score statistic for each pair of `lost` and
    `won`.

    drop: true drop in accuracy under the hypothesis

    The statistic is (lost - won - n drop) / its standard error. The rate of `won` is its
    maximum-likelihood estimate for that drop, the larger root of a quadratic.
    """
    n = float(examples)
    b = -lost - won + (2 * n - lost + won) * drop
    c = -won * drop * (1 - drop)
    rate = (np.sqrt(np.maximum(b * b - 8 * n * c, 0)) - b) / (4 * n)
    rate = np.maximum(rate, max(0.0, -drop))
    variance = n * np.maximum(2 * rate + drop * (1 - drop), 0)
    distance = lost - won - n * drop
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distance == 0, 0.0, distance / np.sqrt(variance))


def p_value(lost: int, won: int, examples: int, drop: float, alpha: float) -> float:
    """Return, for a paired test of two models, an upper bound of the probability of a score as low
    as the observed one.

    drop: true drop in accuracy under the hypothesis

    It is the maximum over the disagreement rates in an interval that holds the true rate with
    probability 1 - gamma, plus gamma = MISSED alpha (Berger and Boos).
    """
    gamma = MISSED * alpha
    low, high = _rate_interval(lost + won, examples, gamma)
    low, high = max(low, abs(drop)), max(min(high, 1.0), abs(drop))
    rates = np.linspace(low, high, NUISANCE_POINTS)
    loses, wins = (rates + drop) / 2, (rates - drop) / 2
    b = _window(examples, float(loses.min()), float(loses.max()))[:, None]
    c = _window(examples, float(wins.min()), float(wins.max()))[None, :]
    possible = b + c <= examples
    seen = score(np.array(float(lost)), np.array(float(won)), examples, drop)
    extreme = possible & (score(b, c, examples, drop) <= seen + 1e-9)
    b, c = np.broadcast_arrays(b, c)
    b, c = b[extreme], c[extreme]
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, examples + 1)))])
    rest = examples - b - c
    ways = logs[examples] - logs[b.astype(int)] - logs[c.astype(int)] - logs[rest.astype(int)]
    worst = 0.0
    for p, q in zip(loses, wins, strict=True):
        terms = ways + _power(p, b) + _power(q, c) + _power(1 - p - q, rest)
        worst = max(worst, float(np.exp(terms).sum()))
    return min(1.0, worst + gamma)


def _power(probability: float, count: Floats) -> Floats:
    """Return, for the paired test, count * log(probability), a term of a log-likelihood, with 0 log
    0 = 0."""
    if probability <= 1e-300:
        return np.where(count > 0, -np.inf, 0.0)
    return count * math.log(probability)


def _window(examples: int, low: float, high: float) -> Floats:
    """Return, for the paired test, the counts that a binomial with a rate between `low` and `high`
    may take, up to about 1e-12 of its mass."""
    reach = 7.5 * math.sqrt(examples * max(high * (1 - low), 1e-12)) + 25
    first = max(0, math.floor(examples * low - reach))
    last = min(examples, math.ceil(examples * high + reach))
    return np.arange(first, last + 1, dtype=np.float64)


def _rate_interval(count: int, examples: int, gamma: float) -> tuple[float, float]:
    """Return the interval of rates of disagreement that a binomial count does not reject at level
    gamma.

    By Chernoff's bound, n KL(count/n, rate) <= log(2/gamma): guaranteed, and a little wider than
    Clopper-Pearson.
    """
    seen, limit = count / examples, math.log(2 / gamma) / examples

    def distance(rate: float) -> float:
        total = 0.0
        if seen > 0:
            total += seen * math.log(seen / rate)
        if seen < 1:
            total += (1 - seen) * math.log((1 - seen) / (1 - rate))
        return total

    def edge(outside: float) -> float:
        inside = seen
        for _ in range(50):
            middle = (inside + outside) / 2
            if distance(min(max(middle, 1e-15), 1 - 1e-15)) <= limit:
                inside = middle
            else:
                outside = middle
        return outside

    return edge(0.0) if count else 0.0, edge(1.0) if count < examples else 1.0
