"""Settings are chosen by the rate that they carry, and not by luck."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from optimizer.load_test.highest_rate import PRECISION, HighestRate
from optimizer.load_test.tuning import Tuning, TuningTrial, Values, find_longest_wait, is_better

START = {"rows": 8, "delay_ms": 0, "workers": 1}


def tuned(carries: Callable[[Values], float], start: Values = START) -> tuple[TuningTrial, Tuning]:
    """Highest rate of a server by its settings."""

    def measure(settings: Values) -> HighestRate:
        met = carries(settings)
        return HighestRate(met, PRECISION * met)

    tuning = Tuning(measure, processors=4)
    return tuning.best(start), tuning


@pytest.mark.parametrize("best", [1, 2, 8, 32])
def test_a_server_that_carries_most_with_so_many_rows_is_given_them(best: int) -> None:
    found, _ = tuned(lambda s: 100.0 * min(s["rows"] / best, best / s["rows"]))
    assert found.settings == {**START, "rows": best}


def test_a_delay_is_taken_where_it_carries_more() -> None:
    found, _ = tuned(lambda s: 100.0 + 20 * min(s["delay_ms"], 4) - s["delay_ms"])
    assert found.settings["delay_ms"] == 4


@pytest.mark.parametrize(("best", "given"), [(2, 2), (4, 4), (64, 4)])
def test_as_many_workers_are_given_as_carry_most_and_processors_are_there(
    best: int, given: int
) -> None:
    found, _ = tuned(lambda s: 100.0 * min(s["workers"] / best, best / s["workers"]))
    assert found.settings == {**START, "workers": given}


def test_slots_are_tuned_of_what_continues_texts() -> None:
    found, _ = tuned(lambda s: min(s["slots"], 16), {"slots": 8})
    assert found.settings == {"slots": 16}


def test_a_server_that_carries_the_same_with_all_keeps_what_it_has() -> None:
    found, tuning = tuned(lambda _: 100.0)
    assert found is tuning.trials[0]


def test_what_only_seemed_better_is_not_taken() -> None:
    """Once, 16 rows carry twice the rate, and never again."""
    luck = iter([100.0, 200.0])
    found, tuning = tuned(lambda _: next(luck, 100.0))
    assert tuning.trials[1].highest.met == 200.0
    assert found.settings == START


def test_noise_within_the_precision_of_a_search_moves_nothing() -> None:
    draw = random.Random(0)
    width = PRECISION**0.5
    found, _ = tuned(lambda _: 100.0 * draw.uniform(1 / width, width))
    assert found.settings == START


def test_a_rate_that_nobody_missed_is_not_beaten() -> None:
    assert not is_better(HighestRate(200.0, None), HighestRate(100.0, None))
    assert is_better(HighestRate(1.0, 2.0), HighestRate(None, 1.0))
    assert not is_better(HighestRate(None, 1.0), HighestRate(None, 1.0))


def test_the_longest_wait_that_keeps_the_objective_is_found_by_halving() -> None:
    tried = []

    def measure(wait: float | None) -> str:
        tried.append(wait)
        return "pass" if wait is not None and wait <= 0.15 else "fail"

    assert find_longest_wait(measure, 1.02, 0.02) == pytest.approx(0.125)  # type: ignore[arg-type]
    assert tried == [None, *(pytest.approx(0.5 / 2**n) for n in range(3))]


def test_a_server_whose_own_wait_keeps_it_needs_none() -> None:
    assert find_longest_wait(lambda _: "pass", 1.0, 0.02) is None


def test_where_no_wait_keeps_it_nothing_is_made_up() -> None:
    with pytest.raises(LookupError):
        find_longest_wait(lambda _: "fail", 1.0, 0.02)
