"""The search ends between a rate that was met and one that was not."""

from __future__ import annotations

import pytest

from optimizer.foundation.verdicts import Verdict
from optimizer.load_test.highest_rate import (
    HIGHEST,
    LOWEST,
    PRECISION,
    RUNS,
    HighestRate,
    search,
)


@pytest.mark.parametrize("true", [0.3, 7.0, 64.0, 900.0])
def test_the_true_rate_lies_between_what_was_met_and_what_was_not(true: float) -> None:
    tried: list[float] = []

    def measure(rate: float) -> Verdict:
        tried.append(rate)
        return "pass" if rate <= true else "inconclusive"

    highest = search(measure, start=10.0)
    assert highest.met is not None
    assert highest.missed is not None
    assert highest.met <= true < highest.missed <= PRECISION * highest.met
    assert {highest.met, highest.missed} <= {*tried}
    assert RUNS[0] <= len(tried) <= RUNS[1]  # as plan predicts


def test_a_server_that_never_meets_them_has_no_rate() -> None:
    highest = search(lambda _: "fail", start=10.0)
    assert highest == HighestRate(met=None, missed=LOWEST)


def test_runs_that_decide_nothing_are_not_a_missed_objective() -> None:
    assert search(lambda _: "inconclusive", start=10.0).verdict == "inconclusive"
    assert search(lambda _: "fail", start=10.0).verdict == "fail"
    assert search(lambda r: "pass" if r < 2 else "inconclusive", start=10.0).verdict == "pass"


def test_a_server_that_always_meets_them_is_asked_no_more_than_can_be_sent() -> None:
    assert search(lambda _: "pass", start=10.0) == HighestRate(met=81920.0, missed=None)
    assert HIGHEST < 2 * 81920


@pytest.mark.parametrize("start", [1.0, 74.0, 200.0])
def test_no_rate_is_tried_at_which_a_run_decides_nothing(start: float) -> None:
    tried: list[float] = []

    def measure(rate: float) -> Verdict:
        tried.append(rate)
        return "pass" if rate <= 80.0 else "fail"

    highest = search(measure, start, least=74.0)
    assert min(tried) == 74.0
    assert highest.met is not None
    assert 74.0 <= highest.met <= 80.0
    assert search(lambda _: "fail", start, least=74.0).met is None
