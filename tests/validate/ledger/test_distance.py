"""Tests of the distance of two arrays."""

from __future__ import annotations

import numpy as np
import pytest

from optimizer.foundation.rounding.tolerance import CHUNK, NOWHERE, squares
from optimizer.validate.ledger.distance import FAR, measure_distance

SEVERAL = 2 * CHUNK + 3  # values that are compared in three parts


def test_each_field_is_what_its_formula_gives() -> None:
    rng = np.random.default_rng(0)
    expected = [rng.normal(size=(n, 5)).astype(np.float32) for n in (2, 7)]
    actual = [e + rng.normal(size=e.shape).astype(np.float32) / 10 for e in expected]
    a, e = (np.concatenate(x).astype(np.float64) for x in (actual, expected))
    measured = measure_distance(zip(actual, expected, strict=True))
    assert measured.relative_l2 == pytest.approx(np.linalg.norm(a - e) / np.linalg.norm(e))
    assert measured.max_abs == pytest.approx(np.abs(a - e).max())
    cosines = [
        np.vdot(x, y) / np.linalg.norm(x) / np.linalg.norm(y)
        for x, y in zip(actual, expected, strict=True)
    ]
    assert measured.cosine == pytest.approx(min(cosines))


def test_the_arrays_are_left_as_they_were() -> None:
    actual, expected = np.ones(4), np.full(4, 2.0)
    measure_distance([(actual, expected)])
    assert (actual.tolist(), expected.tolist()) == ([1.0] * 4, [2.0] * 4)


@pytest.mark.parametrize("wrong", [[1.0, np.nan], [1.0, np.inf], [1.0], [[1.0, 2.0]]])
def test_what_is_not_finite_or_of_another_shape_is_infinitely_far(wrong: object) -> None:
    assert measure_distance([(np.array(wrong), np.array([1.0, 2.0]))]) == FAR


@pytest.mark.parametrize("at", [0, CHUNK - 1, CHUNK, SEVERAL - 1])
def test_a_difference_in_any_part_of_a_large_array_counts(at: int) -> None:
    expected = np.ones((1, SEVERAL), np.float32)
    actual = expected.copy()
    actual[0, at] = 4
    assert squares(actual, expected) == (9.0, SEVERAL, SEVERAL)
    measured = measure_distance([(actual, expected)])
    assert measured.max_abs == 3.0
    assert measured.relative_l2 == pytest.approx(3 / SEVERAL**0.5)
    assert measured.cosine == pytest.approx((SEVERAL + 3) / (SEVERAL * (SEVERAL + 15)) ** 0.5)


@pytest.mark.parametrize("at", [0, CHUNK, SEVERAL - 1])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_found_in_any_part(at: int, value: float) -> None:
    expected = np.ones(SEVERAL, np.float32)
    actual = expected.copy()
    actual[at] = value
    for pair in ((actual, expected), (expected, actual), (actual, actual)):
        assert squares(*pair)[0] == NOWHERE
        assert measure_distance([pair]) == FAR
