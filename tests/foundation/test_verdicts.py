"""Several verdicts taken together."""

from __future__ import annotations

import pytest

from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.verdicts import worst


@pytest.mark.parametrize(
    ("verdicts", "together"),
    [
        (["pass", "pass"], "pass"),
        (["pass", "inconclusive"], "inconclusive"),
        (["inconclusive", "fail", "pass"], "fail"),
        (["pass", "PASS"], "fail"),
        ([None, "inconclusive"], "fail"),
    ],
)
def test_the_worst_verdict_counts_and_an_unknown_one_fails(
    verdicts: list[object], together: str
) -> None:
    assert worst(verdicts) == together


def test_nothing_judged_has_no_verdict() -> None:
    with pytest.raises(OptimizeError):
        worst([])
