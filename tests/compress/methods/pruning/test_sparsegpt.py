"""Pruning by its theory: what looks at more of the inputs loses less of the outputs."""

from __future__ import annotations

import pytest
import torch

from optimizer.compress.methods.pruning.magnitude import magnitude
from optimizer.compress.methods.pruning.sparsegpt import PrunedMatrix, sparsegpt
from optimizer.compress.methods.pruning.support import (
    CLOSE,
    rechoose_units,
    solve_least_squares,
    swap_weights,
)
from optimizer.compress.methods.pruning.wanda import wanda
from optimizer.compress.methods.weights.gptq import gptq, gptq_on_support
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.foundation.qtensor import Scheme
from optimizer.foundation.sections.method_options import SparsegptOptions
from optimizer.foundation.sparsity import Pattern, describe_violation
from tests.compress.correlated import layer, loss, rows
from tests.conftest import heavy_tailed

PATTERNS = [Pattern.parse(t) for t in ("2:4", "4:8", "unstructured 0.5", "unstructured 0.8")]
TWO_OF_FOUR, HALF = PATTERNS[0], PATTERNS[2]
SCHEMES = [
    Scheme(4, True, "group", 32),
    Scheme(4, False, "group", 32),
    Scheme(8),
    Scheme(8, False, "tensor"),
]
DAMPING = SparsegptOptions().damping
LIGHT = SparsegptOptions(damping=1e-3)


def damped(hessian: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    return hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_sparsegpt_loses_less_than_wanda_and_wanda_less_than_magnitude(pattern: Pattern) -> None:
    weight, hessian = layer(seed=3)
    by_size = weight * magnitude(weight, pattern)
    by_input = weight * wanda(weight, hessian.diagonal().sqrt(), pattern)
    adjusted = sparsegpt(weight, hessian, pattern, LIGHT).values
    errors = [loss(weight, v, hessian) for v in (adjusted, by_input, by_size)]
    assert errors[0] < 0.9 * errors[1] < 0.9 * 0.9 * errors[2]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("act_order", [True, False])
def test_the_pattern_holds_in_the_stored_order(pattern: Pattern, act_order: bool) -> None:
    weight, hessian = layer(seed=5)
    made = sparsegpt(weight, hessian, pattern, SparsegptOptions(act_order=act_order))
    assert describe_violation(made.values != 0, pattern) == ""
    assert bool((made.values[~made.mask] == 0).all())
    assert bool((pattern.grouped(~made.mask).sum(-1) >= pattern.zeros(128)).all())


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_block_changes_the_speed_alone(
    pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, hessian = layer(seed=9)
    found = []
    for n in (128, 24):
        monkeypatch.setattr("optimizer.compress.methods.pruning.sparsegpt.BLOCK", n)
        found.append(sparsegpt(weight, hessian, pattern).values)
    one, other = found
    a, b = (loss(weight, v, damped(hessian)) for v in (one, other))
    assert abs(a - b) < 0.03 * a


def test_with_uncorrelated_inputs_sparsegpt_s_mask_is_wanda_s() -> None:
    weight, norms = heavy_tailed((16, 64), 3), torch.rand(64) + 0.5
    made = sparsegpt(weight, norms.square().diag(), TWO_OF_FOUR)
    scale = (norms.square() + DAMPING * norms.square().mean()).sqrt()
    assert torch.equal(made.mask, wanda(weight, scale, TWO_OF_FOUR))
    assert torch.allclose(made.values, weight * made.mask, atol=1e-6)


@pytest.mark.parametrize("pattern", [TWO_OF_FOUR, HALF], ids=str)
def test_more_rounds_never_raise_the_error(pattern: Pattern) -> None:
    weight, hessian = layer(seed=6)

    def error(made: PrunedMatrix) -> float:
        return loss(weight, made.values, damped(hessian))

    errors = [
        error(sparsegpt(weight, hessian, pattern, SparsegptOptions(sweeps=n))) for n in (0, 1, 3)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.99 * errors[0]


@pytest.mark.parametrize("step", ["chosen anew", "swapped"])
def test_every_step_of_improving_the_support_lowers_the_error(step: str) -> None:
    weight, hessian = layer(seed=7)
    D, pattern = damped(hessian), TWO_OF_FOUR if step == "chosen anew" else HALF
    start = weight * magnitude(weight, pattern)
    better = (
        rechoose_units(start, weight, D, pattern)
        if pattern.of
        else swap_weights(start, weight, D, 1)  # a single one: the prediction of its gain is exact
    )
    assert describe_violation(better != 0, pattern) == ""
    row_errors = [((v - weight) @ D * (v - weight)).sum(1) for v in (start, better)]
    assert bool((row_errors[1] <= row_errors[0] * (1 + 1e-5)).all())
    assert float(row_errors[1].sum()) < 0.9 * float(row_errors[0].sum())


@pytest.mark.parametrize("start", ["the weight", "zero"])
def test_least_squares_come_as_close_as_an_exact_solution(start: str) -> None:
    """Of a layer whose inputs are nearly dependent, where a slope soon looks small."""
    weight, hessian = layer(seed=8)
    D, mask = damped(hessian, 1e-4), magnitude(weight, HALF)
    begun = weight if start == "the weight" else torch.zeros_like(weight)
    values = solve_least_squares(weight, D, mask, begun)
    exact = torch.zeros_like(weight)
    for row, kept in enumerate(mask):
        known = (weight[row] @ D)[kept]
        exact[row, kept] = torch.linalg.solve(D[kept][:, kept].double(), known.double()).float()
    assert loss(weight, values, D) < (1 + 100 * CLOSE) * loss(weight, exact, D)
    assert bool((values[~mask] == 0).all())


def test_the_error_of_earlier_blocks_is_answered_for() -> None:
    weight = heavy_tailed((48, 128), seed=1)
    exact = rows(1500, 128, seed=2)
    moved = exact + 0.2 * exact.std() * heavy_tailed((1500, 128), seed=3, scale=1.0)
    hessian, pull = moved.T @ moved, moved.T @ (exact - moved) @ weight.T

    def error(P: torch.Tensor | None) -> float:
        values = sparsegpt(weight, hessian, TWO_OF_FOUR, P=P).values
        return float((exact @ weight.T - moved @ values.T).square().sum())

    assert error(pull) < 0.9 * error(None)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_pruned_integer_is_the_zero_point_and_what_is_left_makes_up_for_it(
    scheme: Scheme,
) -> None:
    weight, hessian = layer(seed=11)
    mask = sparsegpt(weight, hessian, TWO_OF_FOUR).mask
    made = gptq_on_support(weight, hessian.clone(), scheme, mask).q
    assert bool((~made.nonzero() | mask).all())
    apart = rtn(sparsegpt(weight, hessian, TWO_OF_FOUR).values, scheme).dequantize() * mask
    assert loss(weight, made.dequantize(), hessian) < loss(weight, apart, hessian)


def test_with_nothing_pruned_the_integers_are_gptq_s() -> None:
    weight, hessian = layer(seed=12)
    scheme = Scheme(4, True, "group", 32)
    mask = torch.ones_like(weight, dtype=torch.bool)
    one, other = (
        gptq(weight, hessian, scheme).q,
        gptq_on_support(weight, hessian.clone(), scheme, mask).q,
    )
    assert torch.equal(one.integers, other.integers)
    assert torch.equal(one.scale, other.scale)


def test_an_input_that_was_always_zero_changes_nothing_else() -> None:
    weight, hessian = layer(seed=10)
    hessian[5], hessian[:, 5] = 0.0, 0.0
    made = sparsegpt(weight, hessian, TWO_OF_FOUR)
    assert bool(torch.isfinite(made.values).all())


@pytest.mark.parametrize("which", ["weight", "hessian", "P"])
def test_nan_is_refused_by_name(which: str) -> None:
    weight, hessian = layer()
    given = {"weight": weight, "hessian": hessian, "P": hessian @ weight.T}
    given[which][3, 3] = float("nan")
    with pytest.raises(ValueError, match=which):
        sparsegpt(given["weight"], given["hessian"], TWO_OF_FOUR, P=given["P"])


def test_an_n_of_m_that_does_not_divide_the_inputs_is_refused() -> None:
    weight, hessian = layer()
    with pytest.raises(ValueError, match="5 does not divide 128"):
        sparsegpt(weight, hessian, Pattern.parse("2:5"))
