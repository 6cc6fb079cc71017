"""A measured limit lies above correct runs, and not far above."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from optimizer.foundation.rounding.tolerance import CONFIDENCE, tolerance_factor, upper_bound
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.limits.spread import (
    Spread,
    compare_runs,
    judge_alone,
    measure_spread,
)
from optimizer.validate.ledger.trace import Trace

UNIT = 2.0**-24


@pytest.mark.parametrize("values", [12, 60])
@pytest.mark.parametrize("share", [0.99, 1 - 1e-6])
def test_the_bound_covers_its_share_as_often_as_it_says(values: int, share: float) -> None:
    """Simulated: in CONFIDENCE of all samples the bound lies above the share's quantile, but for
    the simulation's own error and the approximation's; and not in all of them."""
    drawn = np.random.default_rng(values).standard_normal((20_000, values))
    bounds = drawn.mean(1) + tolerance_factor(values, share) * drawn.std(1, ddof=1)
    covered = float((bounds >= NormalDist().inv_cdf(share)).mean())
    noise = 4 * math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / len(drawn))
    assert CONFIDENCE - noise - 0.005 <= covered < 1


def test_fewer_values_and_larger_shares_are_further_out() -> None:
    factors = [tolerance_factor(n, 0.999) for n in (3, 5, 10, 30, 100, 10_000)]
    assert factors == sorted(factors, reverse=True)
    assert tolerance_factor(30, 0.9999) > tolerance_factor(30, 0.99)
    assert factors[-1] == pytest.approx(NormalDist().inv_cdf(0.999), rel=0.05)


def test_a_limit_moves_with_what_was_measured_and_is_never_below_a_roundoff() -> None:
    values = np.exp(np.random.default_rng(1).normal(-8, 0.3, 50)).tolist()
    limit = upper_bound(values, 50, 100, UNIT)
    assert limit > max(values)
    assert upper_bound([3 * v for v in values], 50, 100, UNIT) == pytest.approx(3 * limit)
    assert upper_bound([0.0] * 50, 50, 100, UNIT) == UNIT


def test_more_looks_are_given_more_room_and_nothing_measured_gives_no_limit() -> None:
    values = np.exp(np.random.default_rng(2).normal(-8, 0.3, 50)).tolist()
    assert upper_bound(values, 50, 10_000, UNIT) > upper_bound(values, 50, 1, UNIT)
    assert upper_bound([], 0, 1, UNIT) == math.inf
    assert upper_bound([*values, math.nan], 50, 1, UNIT) == math.inf


def test_runs_that_agree_to_the_bit_do_not_widen_the_limit_of_the_others() -> None:
    """As the distances of a saturated softmax are: the bound of the others alone holds for all."""
    moved = np.exp(np.random.default_rng(3).normal(-14, 0.3, 24))
    together = upper_bound([*moved, *np.zeros(24)], 48, 100, UNIT)
    assert max(moved) < together == pytest.approx(upper_bound(list(moved), 24, 100, UNIT))
    assert upper_bound([*moved, *np.full(24, moved.mean())], 48, 100, UNIT) < together


def one_run(seed: int, size: float) -> list[dict[str, Array]]:
    noise = np.random.default_rng(seed).normal(0, size, (4, 5, 8))
    return [{"out": np.asarray(exact() + noise, np.float32)}]


def exact() -> Array:
    return np.random.default_rng(0).standard_normal((4, 5, 8)).astype(np.float32)


def test_correct_runs_are_within_the_limit_and_ten_times_their_distance_is_not() -> None:
    trace = Trace(np.ones((4, 5), np.int64), {}, {"out": exact()})
    runs = [one_run(seed, 1e-4) for seed in range(1, 5)]
    limits = measure_spread(runs, None, [trace], ["out"], UNIT, examples=8).limits
    for seed in range(10, 40):
        assert not compare_runs(limits, one_run(seed, 1e-4), [trace], ["out"])[2]
    _, worst, beyond = compare_runs(limits, one_run(50, 1e-3), [trace], ["out"])
    assert beyond == [("out", worst["out"], limits["out"])]


def test_padding_is_not_measured() -> None:
    mask = np.array([[1, 1, 1, 0, 0]] * 4)
    trace = Trace(mask, {}, {"out": exact()})
    runs = [one_run(seed, 1e-4) for seed in range(1, 5)]
    other = [[{"out": r[0]["out"].copy()}] for r in runs]
    for i, run in enumerate(other):
        run[0]["out"][:, 3:] += i
    first, second = (
        measure_spread(r, None, [trace], ["out"], UNIT, 8).limits for r in (runs, other)
    )
    assert first == second


@pytest.mark.parametrize(("moved", "allowed"), [(0.5, True), (2.0, False)])
def test_only_examples_beyond_the_limit_are_judged_by_runs_of_their_own(
    moved: float, allowed: bool
) -> None:
    expected = exact()
    actual = expected + np.float32(0.01)
    actual[2] = expected[2] * (1 + moved)
    asked = []

    def limit_alone(one: Trace, name: str, usual: float) -> float:
        asked.append(one.result[name])
        return 1.0

    trace = Trace(np.ones((4, 5), np.int64), {}, {"out": expected})
    limits = Spread(4, UNIT, {}, {"out": 0.1}, limit_alone)
    alone = judge_alone(limits, [{"out": actual}], [trace], "out")
    assert np.array_equal(asked, [expected[2:3]])
    assert (alone is not None) == allowed
    if alone is not None:
        assert alone.examples == 1
        assert alone.others < 0.1 < alone.distance < alone.limit
