"""The errors that a search states."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.search.false_winners import MARGIN, Candidate, winner
from optimizer.search import sequential


@pytest.mark.parametrize("rows", [1, 3, 400])
def test_the_looks_spend_alpha_and_end_with_all_rows(rows: int) -> None:
    looks = sequential.plan_looks(rows, 0.05)
    assert sum(look.error for look in looks) == pytest.approx(0.05)
    assert looks[-1].rows == rows
    assert [look.rows for look in looks] == sorted({look.rows for look in looks})


def test_confirmations_spend_no_more_than_alpha() -> None:
    assert sum(sequential.confirmation_error(0.05, k) for k in range(1000)) < 0.05


def test_the_recipe_has_its_own_error_after_any_number_of_others() -> None:
    levels = []

    def judge(name: str, level: float) -> tuple[sequential.Verdict, str]:
        levels.append(level)
        return "fail", ""

    sequential.confirm(["a", "b", "recipe", "c"], judge, 0.06, "recipe".__eq__)
    assert levels == pytest.approx([0.015, 0.005, 0.03, 0.0025])


def test_a_winner_that_misses_the_margin_is_as_rare_as_stated() -> None:
    """Every candidate lies at the margin, so every winner is false. In 40 searches more than 7 are
    false with probability below 0.001 at 5 %; a candidate that passes one test on the search's rows
    is in about a third."""
    generator, false = np.random.default_rng(0), 0
    for _ in range(40):
        draws = generator.random((8, 2, 240))
        outcomes = (draws < MARGIN + 0.01).astype(np.int8) - (draws > 0.99)
        false += (
            winner([Candidate(i, MARGIN, *both) for i, both in enumerate(outcomes)]) is not None
        )
    assert false <= 7


def test_a_form_far_beyond_the_margin_is_stopped_at_the_first_look() -> None:
    seen = []

    def judge(look: sequential.Look) -> tuple[sequential.Verdict, None]:
        seen.append(look.rows)
        return "fail", None

    look, _ = sequential.screen(judge, 400, 0.05)
    assert seen == [100] == [look.rows]
