"""The verdict errs as seldom as promised, and decides when the data can."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from optimizer.validate.quality import metrics
from optimizer.validate.quality.metrics import decide, mean_of_examples
from optimizer.validate.quality.significance import (
    Decision,
    Draws,
    Floats,
    Verdict,
    bound_mean,
    decide_by_bootstrap,
    decide_by_counts,
    decide_by_mean,
    judge_exactly,
)

ALPHA = 0.05
verdict = lru_cache(maxsize=None)(judge_exactly)


def too_often(errors: int, trials: int) -> bool:
    """More errors than a rate of ALPHA explains, allowing three standard errors of chance."""
    return errors / trials > ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / trials)


@pytest.mark.parametrize(
    ("examples", "margin", "disagreement"),
    [
        (300, 0.02, 0.02),
        (300, 0.05, 0.12),
        (900, 0.01, 0.01),
        (900, 0.01, 0.03),
        (900, 0.02, 0.10),
        (2000, 0.01, 0.05),
    ],
)
def test_at_the_margin_a_paired_verdict_errs_in_at_most_alpha(
    examples: int, margin: float, disagreement: float
) -> None:
    """True drop = margin: a pass is false, and so is a fail."""
    lost = (disagreement + margin) / 2
    generator = np.random.default_rng(examples)
    trials = 4000
    draws = generator.multinomial(examples, [lost, lost - margin, 1 - disagreement], trials)
    found: dict[Verdict, int] = {"pass": 0, "fail": 0, "inconclusive": 0}
    for a, b, _ in draws:
        found[verdict(int(a), int(b), examples, margin, ALPHA)] += 1
    assert not too_often(found["pass"], trials)
    assert not too_often(found["fail"], trials)


def test_the_error_rate_is_below_alpha_exactly_and_not_by_luck() -> None:
    """Summed over every outcome: no sampling, no allowance."""
    examples, margin = 400, 0.02
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, examples + 1)))])
    for disagreement in (0.02, 0.04, 0.1):
        lost, won = (disagreement + margin) / 2, (disagreement - margin) / 2
        wrong = {"pass": 0.0, "fail": 0.0}
        for a in range(45):
            for b in range(30 if won > 0 else 1):
                log = logs[examples] - logs[a] - logs[b] - logs[examples - a - b]
                log += a * np.log(lost) + (b * np.log(won) if b else 0.0)
                chance = np.exp(log + (examples - a - b) * np.log(1 - disagreement))
                if chance > 1e-7:
                    found = verdict(a, b, examples, margin, ALPHA)
                    if found != "inconclusive":
                        wrong[found] += chance
        assert max(wrong.values()) <= ALPHA


def test_a_candidate_as_good_as_its_baseline_fails_never_and_passes_with_enough_data() -> None:
    generator = np.random.default_rng(0)
    draws = generator.multinomial(5000, [0.01, 0.01, 0.98], 200)
    found = [verdict(int(a), int(b), 5000, 0.01, ALPHA) for a, b, _ in draws]
    assert "fail" not in found
    assert found.count("pass") > 190


def pairs_world(generator: np.random.Generator, examples: int) -> tuple[Floats, Floats, Floats]:
    """Scores and two systems' similarities; the second is the first with heavy-tailed noise."""
    truth = generator.standard_normal(examples)
    score = np.round(truth + 0.7 * generator.standard_normal(examples), 1)
    baseline = truth + 0.7 * generator.standard_normal(examples)
    return score, baseline, baseline + 0.3 * generator.standard_t(4, examples)


def spearman_drop(score: Floats, a: Floats, b: Floats) -> metrics.Value:
    f, g = metrics.spearman(a, score), metrics.spearman(b, score)
    return lambda w: f(w) - g(w)


def labels_world(generator: np.random.Generator, examples: int) -> metrics.Metric:
    """Three unequal classes, right nine times in ten; 2 % of the right ones get lost."""
    truth = generator.choice(3, examples, p=[0.6, 0.3, 0.1])
    other = (truth + generator.integers(1, 3, examples)) % 3
    a = np.where(generator.random(examples) < 0.9, truth, other)
    b = np.where((a == truth) & (generator.random(examples) < 0.02), other, a)
    return metrics.f1_metric(list(truth[:, None]), list(a[:, None]), list(b[:, None]))


def metric_drop(metric: metrics.Metric) -> metrics.Value:
    return lambda w: metric.baseline(w) - metric.candidate(w)


def test_at_the_margin_a_bootstrap_of_rank_correlation_errs_in_at_most_alpha() -> None:
    big = pairs_world(np.random.default_rng(1), 400_000)
    margin = float(spearman_drop(*big)(np.ones((1, 400_000)))[0])
    generator, trials = np.random.default_rng(2), 250
    found = [
        decide_by_bootstrap(
            spearman_drop(*pairs_world(generator, 200)), 200, margin, 1 - ALPHA, Draws(i, 400)
        ).verdict
        for i in range(trials)
    ]
    assert not too_often(found.count("pass"), trials)
    assert not too_often(found.count("fail"), trials)


def test_at_the_margin_a_bootstrap_of_macro_f1_errs_in_at_most_alpha() -> None:
    big = labels_world(np.random.default_rng(1), 100_000)
    margin = float(metric_drop(big)(np.ones((1, 100_000)))[0])
    generator, trials = np.random.default_rng(2), 250
    found = []
    for i in range(trials):
        metric = labels_world(generator, 300)
        assert metric.imagined
        worse, better = (
            metrics.Metric(*metric.imagined[0]),
            metrics.Metric(*metric.imagined[1]),
        )
        found.append(
            decide_by_bootstrap(
                metric_drop(metric),
                300,
                margin,
                1 - ALPHA,
                Draws(i, 500),
                imagined=(metric_drop(worse), metric_drop(better)),
            ).verdict
        )
    assert not too_often(found.count("pass"), trials)
    assert not too_often(found.count("fail"), trials)


def test_a_bootstrap_of_a_skewed_mean_errs_in_at_most_alpha() -> None:
    generator, trials = np.random.default_rng(3), 200
    margin = float(np.exp(0.5))  # the mean of a standard lognormal
    found = []
    for i in range(trials):
        values = generator.lognormal(0, 1, 300)
        draws = Draws(i, 500)
        decision = decide_by_bootstrap(
            lambda w, v=values: w @ v / w.sum(1), 300, margin, 0.95, draws
        )
        found.append(decision.verdict)
    assert not too_often(found.count("pass"), trials)
    assert not too_often(found.count("fail"), trials)


def test_the_verdict_and_the_interval_say_the_same() -> None:
    for lost in range(0, 40, 4):
        for won in range(0, 20, 5):
            decision = decide_by_counts(lost, won, 500, 0.02, 0.95)
            low, high = decision.interval
            assert low <= decision.drop <= high
            if abs(high - 0.02) > 1e-4 and abs(low - 0.02) > 1e-4:
                expected = "pass" if high < 0.02 else "fail" if low > 0.02 else "inconclusive"
                assert decision.verdict == expected


def test_exchanging_the_systems_mirrors_the_interval() -> None:
    a, b = decide_by_counts(9, 3, 300, 0.05, 0.95), decide_by_counts(3, 9, 300, 0.05, 0.95)
    assert a.interval == pytest.approx((-b.interval[1], -b.interval[0]), abs=1e-4)


def test_as_many_examples_as_are_said_to_be_needed_decide_four_times_in_five() -> None:
    decision = decide_by_counts(8, 6, 400, 0.02, 0.95)
    assert decision.verdict == "inconclusive"
    assert decision.needed is not None
    n = decision.needed
    draws = np.random.default_rng(4).multinomial(n, [8 / 400, 6 / 400, 386 / 400], 300)
    decided = [verdict(int(a), int(b), n, 0.02, ALPHA) for a, b, _ in draws]
    assert 0.65 < decided.count("pass") / 300 < 0.95


def test_no_disagreement_is_not_enough_on_few_examples() -> None:
    """The rule of three: unseen in n examples bounds a rate by about 3 / n."""
    assert judge_exactly(0, 0, 100, 0.01, ALPHA) == "inconclusive"
    assert judge_exactly(0, 0, 320, 0.01, ALPHA) == "pass"
    decision = decide_by_counts(0, 0, 100, 0.01, 0.95)
    assert decision.needed is not None
    assert 290 < decision.needed < 320


def test_a_bootstrap_of_few_examples_never_decides() -> None:
    decision = decide_by_bootstrap(lambda w: 0 * w.sum(1), 20, 0.1, 0.95)
    assert decision.verdict == "inconclusive"


def test_the_same_data_gives_the_same_verdict_and_bounds() -> None:
    values = np.random.default_rng(5).random(100)
    first, second = (
        decide_by_bootstrap(lambda w: w @ values / w.sum(1), 100, 0.5, 0.95) for _ in range(2)
    )
    assert first == second


DRAWS = {  # of one drop per window, and their true mean
    "normal": (lambda g, n: g.standard_normal(n), 0.0),
    "heavy-tailed": (lambda g, n: g.standard_t(4, n), 0.0),
    "skewed": (lambda g, n: g.gamma(4.0, 1.0, n), 4.0),
    "exponential": (lambda g, n: g.exponential(1.0, n), 1.0),
}


@pytest.mark.parametrize("examples", [20, 60])
@pytest.mark.parametrize("shape", DRAWS)
def test_at_the_margin_a_mean_over_windows_errs_in_at_most_alpha(shape: str, examples: int) -> None:
    draw, margin = DRAWS[shape]
    generator, trials = np.random.default_rng(6), 1000
    found = [decide_by_mean(draw(generator, examples), margin, 0.95).verdict for _ in range(trials)]
    assert not too_often(found.count("pass"), trials)
    assert not too_often(found.count("fail"), trials)


def test_a_mean_far_below_the_margin_passes_and_one_far_above_fails() -> None:
    drops = np.random.default_rng(7).normal(0.02, 0.01, 30)
    assert decide_by_mean(drops, 0.05, 0.95).verdict == "pass"
    assert decide_by_mean(drops, 0.005, 0.95).verdict == "fail"
    assert decide_by_mean(drops[:10], 0.05, 0.95).verdict == "inconclusive"


def test_as_many_windows_as_are_said_to_be_needed_decide_four_times_in_five() -> None:
    generator = np.random.default_rng(8)
    drops = generator.normal(0.042, 0.03, 30)
    decision = decide_by_mean(drops, 0.05, 0.95)
    assert decision.verdict == "inconclusive"
    assert decision.needed is not None
    spread = float(drops.std(ddof=1))
    again = [
        decide_by_mean(generator.normal(decision.drop, spread, decision.needed), 0.05, 0.95).verdict
        for _ in range(300)
    ]
    assert 0.65 < again.count("pass") / 300 < 0.95


def test_a_skewed_mean_is_bounded_further_on_the_side_of_the_tail() -> None:
    values = np.random.default_rng(9).exponential(1.0, 40)
    low, high = bound_mean(values, 0.025)
    assert high - values.mean() > values.mean() - low > 0
    mirrored = bound_mean(-values, 0.025)
    assert mirrored == pytest.approx((-high, -low))


def test_equal_systems_have_a_mean_without_doubt() -> None:
    decision = decide_by_mean(np.zeros(25), 0.01, 0.95)
    assert (decision.verdict, decision.interval) == ("pass", (0.0, 0.0))


def test_the_examples_that_are_needed_make_up_for_the_imagined_ones() -> None:
    """One answer of 180 loses half: the bound is mostly that of three imagined losses."""

    def judged(times: int) -> Decision:
        right, found = np.ones(180 * times), np.tile(np.r_[0.46, np.ones(179)], times)
        metric = mean_of_examples(right, found, 1.0, 0.95, {})
        return decide(metric, 180 * times, 0.02, 0.95)

    few = judged(1)
    assert few.verdict == "inconclusive"
    assert few.needed is not None
    times = -(-few.needed // 180)
    assert judged(times).verdict == "pass"
    assert times <= 4  # not said for caution alone
