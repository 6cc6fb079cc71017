"""Timing continues until it decides, errs no more for several looks, and ends in time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from optimizer.harness.bounds import CONFIDENCE
from optimizer.harness.bundle.bench import percentile_interval
from optimizer.timing.stopping_rules import (
    PrecisionRule,
    QuantileQuestion,
    Question,
    RatioQuestion,
    SequentialTest,
    TimeBudget,
    confidence_of,
    student_quantile,
)

FASTER = QuantileQuestion(50, 1.0)


class Clock:
    """A clock with a settable time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(
    rounds: SequentialTest,
    sample: Callable[[], float],
    clock: Clock,
    at_first: int,
    each: float = 1.0,
) -> list[float]:
    """All samples of a run whose rounds take `each` seconds."""
    samples: list[float] = []
    left = at_first
    while left:
        samples += [sample() for _ in range(left * rounds.question.per_round)]
        clock.now += left * each
        left = rounds.more(samples)
    return samples


def run(
    seed: int, ratio: float, iterations: int = 10, seconds: float | None = 1000, noise: float = 0.2
) -> tuple[SequentialTest, int]:
    """A cell whose true median ratio is `ratio`, and the rounds it took."""
    generator, clock = np.random.default_rng(seed), Clock()
    rounds = SequentialTest(FASTER, iterations, seconds, clock)
    found = timed(
        rounds, lambda: float(ratio * np.exp(noise * generator.standard_t(3))), clock, iterations
    )
    return rounds, len(found)


def test_all_looks_together_may_err_as_often_as_one() -> None:
    alpha = 1 - CONFIDENCE
    spent = [1 - confidence_of(k) for k in range(1, 2000)]
    assert sum(spent) == pytest.approx(alpha, rel=1e-3)
    assert sum(spent) < alpha
    assert confidence_of(1, single=True) == CONFIDENCE


def test_a_ratio_at_its_limit_passes_wrongly_no_more_often_than_promised() -> None:
    """Looks at all of alpha would, so this is not true of any schedule."""
    looks, seeds = [10 << k for k in range(7)], 1200
    generator = np.random.default_rng(0)
    times = np.exp(generator.standard_t(3, (seeds, looks[-1])))

    def passes(confidence: Callable[[int], float]) -> float:
        # The rank of the upper end is that of the sorted numbers themselves.
        upper = [percentile_interval(range(n), 50, confidence(k)) for k, n in enumerate(looks, 1)]
        below = np.zeros(seeds, bool)
        for n, (_, rank) in zip(looks, upper, strict=True):
            assert rank is not None
            below |= np.partition(times[:, :n], int(rank), 1)[:, int(rank)] < 1
        return float(below.mean())

    allowed = (1 - CONFIDENCE) / 2
    sampling = 3 * (allowed / seeds) ** 0.5
    assert passes(confidence_of) <= allowed + sampling <= 0.05
    assert passes(lambda _: CONFIDENCE) > allowed + sampling


def equal_systems(seed: int, question: Question) -> SequentialTest:
    """Time two equal systems, each of which an opening makes faster or slower by 2 %."""
    generator, clock = np.random.default_rng(seed), Clock()
    rule = SequentialTest(question, 20, 300.0, clock)
    times: list[list[float]] = [[], []]
    left = 20
    while left:
        for _ in range(left):
            if len(times[0]) % question.rounds == 0 and (question.rounds > 1 or not times[0]):
                placed = 0.02 * generator.standard_normal(2)
            for system, own in zip(times, placed, strict=True):
                system.append(float(np.exp(own + 0.05 * generator.standard_t(3))))
        clock.now += left
        samples = (
            question.samples(*times)
            if isinstance(question, RatioQuestion)
            else [a / b for a, b in zip(*times, strict=True)]
        )
        left = rule.more(samples)
    return rule


def test_equal_systems_pass_no_more_often_than_promised_wherever_their_sessions_lie() -> None:
    """Rounds of a single opening decide for whichever session lies better."""

    def passes(question: Question) -> float:
        highs = [equal_systems(seed, question).interval[1] for seed in range(300)]
        return float(np.mean([high is not None and high < 1 for high in highs]))

    allowed = (1 - CONFIDENCE) / 2
    assert passes(RatioQuestion.share_rounds(1.0, 20)) <= allowed + 3 * (allowed / 300) ** 0.5
    assert passes(FASTER) > 0.2


def test_equal_systems_whose_sessions_have_two_speeds_pass_no_more_often_than_promised() -> None:
    """All openings of a look may have one ratio, without a spread."""

    def passes(generator: np.random.Generator) -> bool:
        rule, samples = SequentialTest(RatioQuestion.share_rounds(1.0, 20), 20, None), list[float]()
        while not rule.looks:
            slower, noise = generator.integers(2, size=2), 0.001 * generator.normal()
            samples.append(float(np.exp(0.03 * (int(slower[0]) - int(slower[1])) + noise)))
            rule.more(samples)
        return rule.interval[1] is not None and rule.interval[1] < 1

    generator, allowed = np.random.default_rng(0), (1 - CONFIDENCE) / 2
    rate = np.mean([passes(generator) for _ in range(1000)])
    assert rate <= allowed + 3 * (allowed / 1000) ** 0.5


@pytest.mark.parametrize(("ratio", "most"), [(0.5, 3), (0.9, 6)])
def test_the_clearer_a_ratio_is_the_fewer_openings_decide_it(ratio: float, most: int) -> None:
    for seed in range(20):
        generator, samples, left = np.random.default_rng(seed), list[float](), 20
        rule = SequentialTest(RatioQuestion.share_rounds(1.0, 20), 20, 1000.0, Clock())
        while left:
            openings = left // rule.question.rounds
            samples += [ratio * float(np.exp(0.03 * generator.normal())) for _ in range(openings)]
            left = rule.more(samples)
        assert rule.interval[1] is not None
        assert rule.interval[1] < 1
        assert len(samples) <= most
        assert rule.as_dict()["looks"][0]["rounds"] == 24


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (120, 1.980)]
)
def test_students_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    """Abramowitz and Stegun, table 26.10."""
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, abs=5e-4)


def test_a_run_at_the_limit_continues_until_the_time_is_spent() -> None:
    ends = [run(seed, 1.0) for seed in range(40)]
    undecided = [(rounds, taken) for rounds, taken in ends if not rounds.decided]
    assert len(undecided) > 30
    assert {taken for _, taken in undecided} == {640}  # 1280 rounds would not be over in time


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_five_iterations_continue_until_they_decide(ratio: float) -> None:
    rounds, taken = run(0, ratio, iterations=5)
    assert rounds.decided
    assert 5 < taken <= 40
    low, high = rounds.interval
    assert low is not None
    assert high is not None
    assert (high < 1) == (ratio < 1)


def test_without_a_time_budget_there_is_one_look_at_the_iterations() -> None:
    rounds, taken = run(0, 1.0, iterations=50, seconds=None)
    assert taken == 50
    (look,) = rounds.looks
    assert (look.rounds, look.confidence) == (50, CONFIDENCE)


@pytest.mark.parametrize("seconds", [0.0, 30.0, 65.0])
def test_no_stage_is_begun_that_would_not_end_in_time(seconds: float) -> None:
    _, taken = run(1, 1.0, iterations=16, seconds=seconds)
    assert taken == max(n for n in (16, 32, 64) if n <= max(seconds, 16))


def test_an_undecided_run_says_how_many_rounds_would_decide() -> None:
    decided = []
    for seed in range(20):
        rounds, taken = run(seed, 0.97, seconds=100)
        needed = rounds.needed()
        if rounds.decided or needed is None:
            continue
        assert needed["rounds"] > taken
        assert needed["seconds"] == pytest.approx(needed["rounds"])
        again, _ = run(seed, 0.97, seconds=4 * needed["seconds"])
        decided.append(again.decided)
    assert len(decided) > 10
    assert np.mean(decided) > 0.7


def test_a_high_percentile_is_first_looked_at_where_it_can_be_bounded() -> None:
    clock = Clock()
    rounds = SequentialTest(QuantileQuestion(99, 2.0, per_round=31), 5, 1000, clock)
    samples = timed(rounds, itertools.repeat(1.0).__next__, clock, 5)
    assert rounds.decided
    assert len(samples) // 31 == rounds.looks[0].rounds > 5
    unreached = SequentialTest(QuantileQuestion(99, 2.0), 5, 100, clock)
    timed(unreached, itertools.repeat(1.0).__next__, clock, 5)
    assert unreached.interval == (None, None)
    needed = unreached.needed()
    assert needed is not None
    assert needed["rounds"] > 368


def test_the_time_is_shared_by_the_questions_and_what_one_leaves_the_next_may_take() -> None:
    clock = Clock()
    budget = TimeBudget(90.0, 3, clock)
    assert budget.test(FASTER, 5).seconds == 30
    clock.now = 10.0
    assert budget.test(FASTER, 5).seconds == 40
    clock.now = 100.0
    assert budget.test(FASTER, 5).seconds == pytest.approx(-10)
    assert TimeBudget(0.0, 1, clock).test(FASTER, 5).seconds is None


@pytest.mark.parametrize(("noise", "seconds", "ended"), [(0.01, 1e9, 40), (0.5, 100.0, 80)])
def test_a_median_settles_or_the_time_is_spent(noise: float, seconds: float, ended: int) -> None:
    """40 samples at one second each: precise at once, or no third stage within the time."""
    clock, generator = Clock(), np.random.default_rng(0)
    settling = PrecisionRule(0.02, seconds, clock)
    samples: list[float] = []
    left = 40
    while left:
        samples += [*np.exp(noise * generator.standard_normal(left))]
        clock.now += left
        left = settling.more(samples)
    assert len(samples) == ended
