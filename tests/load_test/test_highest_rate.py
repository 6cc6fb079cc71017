"""The search ends between a rate that was met and one that was not."""

from __future__ import annotations

import pytest

from optimizer.load_test.highest_rate import HIGHEST, LOWEST, PRECISION, HighestRate, search
from optimizer.verdicts import Verdict


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


def test_a_server_that_never_meets_them_has_no_rate() -> None:
    highest = search(lambda _: "fail", start=10.0)
    assert highest.met is None
    assert highest.missed is not None
    assert highest.missed < 2 * LOWEST


def test_a_server_that_always_meets_them_is_asked_no_more_than_can_be_sent() -> None:
    assert search(lambda _: "pass", start=10.0) == HighestRate(met=81920.0, missed=None)
    assert HIGHEST < 2 * 81920
