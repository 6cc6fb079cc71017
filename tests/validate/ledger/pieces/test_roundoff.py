"""Forward error bounds hold for every order of a sum, and are far below a fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optimizer.validate.ledger.pieces import roundoff
from optimizer.validate.ledger.pieces.roundoff import UNIT, ModuleProduct
from tests.conftest import heavy_tailed

TOKENS, INPUTS, OUTPUTS = 24, 576, 16


def drawn(seed: int) -> tuple[Any, Any, Any]:
    """x (tokens, in), weight (out, in), bias (out,): float32, heavy tails."""
    x = heavy_tailed((TOKENS, INPUTS), seed, 1.0).numpy()
    return (
        x,
        heavy_tailed((OUTPUTS, INPUTS), seed + 1).numpy(),
        heavy_tailed((OUTPUTS,), seed + 2).numpy(),
    )


def ratios(found: Any, x: Any, product: ModuleProduct) -> Any:
    """|error| / bound of every element."""
    whole = np.empty(found.shape)
    for part, exact, bound in roundoff.compute_parts(x.astype(np.float64), product):
        whole[:, part] = roundoff.compute_ratio(found[:, part].astype(np.float64), exact, bound)
    return whole


def one_after_another(terms: Any, order: Any) -> Any:
    """Sums over the last axis in this order, rounded to float32 at every step."""
    return np.cumsum(terms[..., order], axis=-1, dtype=np.float32)[..., -1]


@pytest.mark.parametrize("seed", range(4))
def test_float32_sums_in_any_order_stay_inside_and_not_far(seed: int) -> None:
    """Of all elements in all orders the worst comes within a hundredth of its bound."""
    x, weight, bias = drawn(seed)
    order = np.random.default_rng(seed).permutation(INPUTS)
    by_size = np.argsort(-np.abs(x).sum(0))
    terms = x[:, None] * weight[None]
    worst = [
        ratios(one_after_another(terms, o) + bias, x, ModuleProduct(weight, bias, "fp32")).max()
        for o in (np.arange(INPUTS), order, by_size, by_size[::-1])
    ]
    assert 0.01 < max(worst) <= 1


def test_operands_and_results_in_float16_stay_inside() -> None:
    x, weight, bias = drawn(5)
    half = np.float16
    weight, bias = weight.astype(half), bias.astype(half)
    product = (x.astype(half).astype(np.float64) @ weight.astype(np.float64).T).astype(half)
    assert ratios(product + bias, x, ModuleProduct(weight, bias, "fp16", operands=1)).max() <= 1


def test_the_bound_of_a_long_sum_is_below_that_of_the_worst_case() -> None:
    """n roundoffs of sum |x w|: what no order of the sum can exceed."""
    x, weight, _ = drawn(6)
    x = np.tile(x, 8)
    weight = np.tile(weight, 8)
    worst = x.shape[1] * UNIT["fp32"] * (np.abs(x) @ np.abs(weight).T)
    for part, _, bound in roundoff.compute_parts(
        x.astype(np.float64), ModuleProduct(weight, None, "fp32")
    ):
        assert (bound < worst[:, part] / 4).all()


def test_exact_integer_sums_leave_a_few_roundoffs_of_the_result_however_long_they_are() -> None:
    x, weight, _ = drawn(7)
    integers, step = np.rint(x * 8), 0.125
    for _, exact, bound in roundoff.compute_parts(
        integers * step, ModuleProduct(weight, None, "fp32", integer=True)
    ):
        assert (bound <= 8 * UNIT["fp32"] * np.abs(exact) + 1e-40).all()


@pytest.mark.parametrize("integer", [True, False])
def test_one_percent_in_one_channel_is_outside(integer: bool) -> None:
    x, weight, _ = drawn(8)
    found = x.astype(np.float64) @ weight.T.astype(np.float64)
    found[:, 3] *= 1.01
    far = ratios(found, x, ModuleProduct(weight, None, "fp32", integer=integer)).max(0)
    assert far[3] > 1
    assert np.delete(far, 3).max() < 1


def test_bounds_scale_with_their_inputs() -> None:
    x, weight, _ = drawn(9)
    product = ModuleProduct(weight, None, "fp32")
    (_, _, small), (_, _, large) = (
        next(roundoff.compute_parts(by * x.astype(np.float64), product)) for by in (1.0, 1024.0)
    )
    np.testing.assert_allclose(large, 1024 * small, rtol=1e-6)


def test_inputs_in_int8_blocks_stay_inside_and_one_step_more_does_not() -> None:
    x, weight, _ = drawn(10)
    blocks = x.reshape(TOKENS, -1, 32)
    step = np.abs(blocks).max(-1, keepdims=True) / 127
    product = ModuleProduct(weight, None, "fp32", block=32)
    coded = (np.rint(blocks / step) * step).reshape(x.shape)
    assert ratios(coded @ weight.T, x, product).max() <= 1
    moved = ((np.rint(blocks / step) + 1) * step).reshape(x.shape)
    assert ratios(moved @ weight.T, x, product).max() > 1


def test_values_whose_bound_overflows_are_refused() -> None:
    x, weight, _ = drawn(6)
    product = ModuleProduct(weight, None, "fp16", operands=1)
    with np.errstate(over="ignore"):
        assert np.isinf(ratios(x @ weight.T, x * np.float64(1e22), product)).all()
