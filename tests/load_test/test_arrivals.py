"""Arrivals depend on rate, time and seed alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from optimizer.foundation.errors import DataError
from optimizer.load_test import arrivals
from optimizer.recipe.serving import solve_mean_requests

RATE, SECONDS = 50.0, 200.0
SPREAD = 5 * (RATE * SECONDS) ** 0.5  # five standard deviations of a Poisson number


def test_independent_requests_are_so_many_and_as_unequal_as_poisson_says() -> None:
    instants = arrivals.poisson(RATE, SECONDS, seed=1)
    assert abs(len(instants) - RATE * SECONDS) < SPREAD
    assert instants == sorted(instants)
    assert instants[-1] < SECONDS
    gaps = [b - a for a, b in itertools.pairwise(instants)]
    mean = sum(gaps) / len(gaps)
    variance = sum((g - mean) ** 2 for g in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.2)  # exponential: both are 1 / rate squared


def test_bursts_keep_the_rate_and_come_together() -> None:
    instants = arrivals.bursts(RATE, SECONDS, seed=1, size=8)
    assert abs(len(instants) - RATE * SECONDS) < 8**0.5 * SPREAD
    assert all(len({*instants[i : i + 8]}) == 1 for i in range(0, len(instants), 8))


def test_a_recording_is_stretched_to_the_rate_and_repeated() -> None:
    instants = arrivals.recorded([10.0, 10.1, 10.4], rate=2.0, seconds=3.0)
    assert instants == pytest.approx([0.25, 1.0, 1.25, 2.0, 2.25])


def test_the_same_seed_gives_the_same_instants_and_another_others() -> None:
    one, again, other = (arrivals.poisson(5.0, 10.0, seed) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\nx\n", ":2: 'x'"),
        ("1\nnan\n", ":2: 'nan'"),
        ("3\n3\n", "fewer than two distinct"),
        ("3\n", "fewer than two distinct"),
        (None, "cannot be read"),
    ],
)
def test_a_recording_that_is_none_is_refused(
    text: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "recording.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=message):
        arrivals.read(file)


@pytest.mark.parametrize("burst", [1, 4])
def test_a_run_has_as_many_requests_as_are_needed_as_often_as_is_said(burst: int) -> None:
    rate = solve_mean_requests(368, burst, confidence=0.9) / 10
    runs = [len(arrivals.bursts(rate, 10.0, seed, burst)) for seed in range(400)]
    assert 0.85 <= sum(n >= 368 for n in runs) / len(runs) <= 0.95
