"""The fewest of the most sensitive modules stay float."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from optimizer.compress.methods.precision.keep_float_auto import RelativeError, choose_float_modules

ERRORS = {"a": 0.1, "b": 0.4, "c": 0.2, "d": 0.3, "e": 0.05}


def together(modules: Sequence[str]) -> float:
    """As if their errors were independent."""
    return math.sqrt(sum(ERRORS[m] ** 2 for m in modules))


@pytest.mark.parametrize(
    ("most", "expected"),
    [(0.6, ()), (0.4, ("b",)), (0.2, ("b", "d", "c")), (0.05, ("b", "d", "c", "a"))],
)
def test_no_fewer_would_do(most: float, expected: tuple[str, ...]) -> None:
    kept = choose_float_modules(ERRORS, together, most)
    assert kept.modules == expected
    assert kept.error <= most or not expected
    assert kept.before == together(list(ERRORS))


def test_nothing_is_quantized_where_any_module_costs_more() -> None:
    kept = choose_float_modules(ERRORS, together, 0.01)
    assert set(kept.modules) == set(ERRORS)
    assert kept.error == 0.0


def test_an_output_of_zeros_is_wrong_by_one() -> None:
    error = RelativeError()
    for size in (3, 5):
        error.update(torch.rand(size, 4) + 1, torch.zeros(size, 4))
    assert error.value == pytest.approx(1.0)
