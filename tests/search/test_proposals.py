"""Proposals: every candidate, or those of a sampler where there are more than trials."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optimizer.search.candidates import SHARES, Candidate
from optimizer.search.expectation import Expectation, kendall_tau
from optimizer.search.proposals import Proposals, Ranked, Sampled
from optimizer.search.trial import Trial, find_pareto_set, order_for_confirmation

METHODS = ("rtn", "gptq", "awq")
SPACE = [Candidate(0, (name,), "float", share) for name in METHODS for share in SHARES]
MODULES = {str(i): {"error": 0.01 * (i + 1), "weights": 1.0} for i in range(32)}


def expect(trials: list[Trial]) -> Expectation:
    kept = {c: [str(31 - i) for i in range(int(32 * c.finer))] for c in SPACE}
    return Expectation(MODULES, kept, trials, "latency")


def measured(candidate: Candidate) -> Trial:
    """A trial whose time and size grow with the share, and whose drop falls."""
    drop = 0.03 * (1 - candidate.finer) + 0.002 * METHODS.index(candidate.methods[0])
    outcome = "kept" if drop < 0.025 else "stopped"
    ratio = None if outcome == "stopped" else 1 + candidate.finer
    size = int(32 * (1 + candidate.finer))
    return Trial(candidate, str(candidate), outcome, size=size, drop=drop, ratio=ratio)


def ranked() -> Ranked:
    return Ranked(SPACE, expect, 0.025)


def carry_out(proposals: Proposals, trials: list[Trial], count: int) -> list[Trial]:
    while len(trials) < count and (candidate := proposals.propose(trials)):
        trial = measured(candidate)
        proposals.tell(trial)
        trials.append(trial)
    return trials


def test_all_candidates_are_tried_once_and_those_expected_to_fail_last() -> None:
    trials = carry_out(ranked(), [measured(SPACE[0])], 99)
    assert sorted(map(repr, (t.candidate for t in trials))) == sorted(map(repr, SPACE))
    outcomes = [t.outcome for t in trials[4:]]
    assert outcomes.index("kept") < len(outcomes) - outcomes[::-1].index("stopped")
    kept = [t.ratio for t in trials[8:] if t.outcome == "kept"]
    assert kept == sorted(kept, key=lambda r: r or 0.0)


def test_by_quality_the_finest_form_that_fits_is_tried_first() -> None:
    """A share s takes 1 + s of the recipe's bytes; what is too large comes last, smallest first."""

    def by_quality(trials: list[Trial]) -> Expectation:
        return replace(expect(trials), name="quality", added_bytes=1)

    proposals = Ranked(SPACE, by_quality, 1.0, most=36)
    trials = carry_out(proposals, [measured(SPACE[0])], len(SPACE))
    assert trials[1].candidate.finer == 1 / 8
    assert [t.candidate.finer for t in trials[12:]] == [1 / 4] * 3 + [1 / 2] * 3


def test_the_same_results_give_the_same_trials_whatever_was_searched_before() -> None:
    pytest.importorskip("optuna")

    def search() -> list[Trial]:
        trials = carry_out(ranked(), [measured(SPACE[0])], 3)
        sampled = Sampled(ranked(), "latency", 0)
        for trial in trials:
            sampled.tell(trial)
        return carry_out(sampled, trials, 9)

    whole = search()
    assert len(whole) == 9
    assert search() == whole


def test_the_pareto_set_has_no_form_that_another_beats() -> None:
    figures = [(0.01, 1.0), (0.02, 0.8), (0.02, 0.9), (0.0, 1.0), (0.005, 1.1)]
    trials = [
        Trial(SPACE[i], str(i), "kept", size=1, drop=drop, ratio=ratio)
        for i, (drop, ratio) in enumerate(figures)
    ]
    stopped = Trial(SPACE[5], "5", "stopped", size=1, drop=0.0, ratio=0.5)
    assert [t.label for t in find_pareto_set([*trials, stopped])] == ["1", "3"]


def test_of_times_that_do_not_surely_differ_the_lowest_bound_of_the_drop_is_confirmed_first() -> (
    None
):
    figures = [  # time, its interval, upper bound of the drop
        (1.0, (1.0, 1.0), 0.012),
        (0.93, (0.71, 1.21), 0.018),
        (0.96, (0.90, 1.02), 0.011),
        (1.4, (1.3, 1.5), 0.001),
    ]
    trials = [
        Trial(
            SPACE[i],
            str(i),
            "kept",
            size=10 - i,
            drop=high - 0.01,
            drop_interval=(None, high),
            ratio=ratio,
            ratio_interval=interval,
        )
        for i, (ratio, interval, high) in enumerate(figures)
    ]
    orders = {
        name: [t.label for t in order_for_confirmation(trials, name)]
        for name in ("latency", "size", "quality")
    }
    assert orders["latency"] == ["2", "0", "1", "3"]
    assert orders["size"] == ["3", "2", "1", "0"]
    assert orders["quality"] == ["3", "2", "0", "1"]


def test_a_time_that_is_surely_longer_than_any_other_is_not_confirmed_first() -> None:
    times = [(0.86, (0.52, 1.43)), (0.93, (0.84, 1.03)), (1.24, (1.10, 1.40))]
    trials = [
        Trial(
            SPACE[i],
            str(i),
            "kept",
            drop_interval=(None, 0.01 / (i + 1)),
            ratio=r,
            ratio_interval=c,
        )
        for i, (r, c) in enumerate(times)
    ]
    assert [t.label for t in order_for_confirmation(trials, "latency")] == ["1", "2", "0"]


def test_a_time_that_is_surely_shorter_than_the_recipes_is_confirmed_first() -> None:
    """The intervals are those of a search of MiniLM; the widest includes all others."""
    figures = [
        ((1.0, 1.0), 0.0121),
        ((0.927, 1.090), 0.0041),
        ((0.897, 0.986), 0.0095),
        ((0.850, 0.959), 0.0201),
        ((0.579, 1.270), 0.0095),
    ]
    trials = [
        Trial(
            SPACE[i],
            str(i),
            "kept",
            drop_interval=(None, high),
            ratio=sum(interval) / 2,
            ratio_interval=interval,
        )
        for i, (interval, high) in enumerate(figures)
    ]
    ordered = [t.label for t in order_for_confirmation(trials, "latency")]
    assert ordered[:2] == ["2", "3"]
    assert len(ordered) == 5


def test_kendalls_tau_counts_pairs_in_the_same_order_less_those_in_the_other() -> None:
    pairs = [(1.0, 2.0), (2.0, 1.0), (3.0, 4.0), (4.0, 3.5), (5.0, 9.0)]
    assert kendall_tau(pairs) == pytest.approx((8 - 2) / 10)
    assert kendall_tau(pairs[:1]) is None
