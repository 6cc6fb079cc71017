"""GPTQ by its theory: worse than rounding on the weights, better on the outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optimizer.compress.methods.weights.factorization import Factorization, factorize, permute
from optimizer.compress.methods.weights.gptq import RoundedMatrix, gptq
from optimizer.compress.methods.weights.hessian import (
    aim_at_float,
    weigh_first_tokens,
    weigh_tokens,
)
from optimizer.compress.methods.weights.rtn import measure_relative_error, rtn
from optimizer.foundation.qtensor import Scheme, absmax_scale, quantize
from optimizer.foundation.sections.method_options import GptqOptions
from optimizer.recipe.compression.quantize import Quantize
from tests.compress.correlated import layer, loss, rows
from tests.conftest import heavy_tailed

DAMPING = GptqOptions().damping
GROUPS = [Scheme(bits, True, "group", 32) for bits in (3, 4)]
SCHEMES = [
    *GROUPS,
    Scheme(4, False, "group", 32),
    Scheme(4, True, "group", 32, full_range=True),
    Scheme(3, False),
    Scheme(4),
    Scheme(4, granularity="tensor"),
    Scheme(8),
    Scheme(8, False, "tensor"),
]


def with_constant(name: str, value: int, *arguments: Any) -> RoundedMatrix:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"optimizer.compress.methods.weights.gptq.{name}", value)
        return gptq(*arguments)


def factor_in(order: torch.Tensor, hessian: torch.Tensor) -> Factorization:
    H = hessian.clone()
    permute(H, order)
    return factorize(H, DAMPING)


@pytest.mark.parametrize("scheme", GROUPS, ids=str)
@pytest.mark.parametrize("sweeps", [0, 3])
def test_gptq_is_worse_on_the_weight_and_better_on_the_output(scheme: Scheme, sweeps: int) -> None:
    weight, hessian = layer()
    plain, found = rtn(weight, scheme), with_constant("SWEEPS", sweeps, weight, hessian, scheme).q
    assert measure_relative_error(weight, found.dequantize()) > measure_relative_error(
        weight, plain.dequantize()
    )
    error = loss(weight, found.dequantize(), hessian)
    assert error < 0.6 * loss(weight, plain.dequantize(), hessian)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_scheme_gains_and_keeps_its_format(scheme: Scheme) -> None:
    weight, hessian = layer(seed=5)
    found = gptq(weight, hessian, scheme).q  # a QTensor checks its own shapes and ranges
    assert found.scheme == scheme
    error = loss(weight, found.dequantize(), hessian)
    assert error < loss(weight, rtn(weight, scheme).dequantize(), hessian)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_size_of_a_block_does_not_change_the_result(scheme: Scheme) -> None:
    weight, hessian = layer(seed=9)
    a, b = (with_constant("BLOCK", n, weight, hessian, scheme).q for n in (128, 7))
    assert float((a.integers != b.integers).float().mean()) < 0.01
    one, other = (loss(weight, q.dequantize(), hessian) for q in (a, b))
    assert abs(one - other) < 0.01 * one


def test_large_activations_first_is_better_and_has_the_same_format() -> None:
    weight, hessian = layer(seed=13)
    scheme = Scheme(4, True, "group", 32)
    ordered, natural = (
        with_constant("SWEEPS", 0, weight, hessian, scheme, GptqOptions(act_order=order)).q
        for order in (True, False)
    )
    assert ordered.scale.shape == natural.scale.shape
    error = loss(weight, ordered.dequantize(), hessian)
    assert error < loss(weight, natural.dequantize(), hessian)


def test_without_correlation_gptq_is_rounding() -> None:
    weight = heavy_tailed((16, 64), seed=3)
    found = with_constant("SWEEPS", 0, weight, torch.eye(64), Scheme(4, True, "group", 32)).q
    assert torch.equal(found.integers, rtn(weight, found.scheme).integers)


def test_the_error_of_earlier_blocks_is_answered_for() -> None:
    weight = heavy_tailed((48, 128), seed=1)
    exact = rows(1500, 128, seed=2)
    quantized = exact + 0.2 * exact.std() * heavy_tailed((1500, 128), seed=3, scale=1.0)
    hessian, pull = quantized.T @ quantized, quantized.T @ (exact - quantized) @ weight.T
    scheme = Scheme(4, True, "group", 32)

    def error(**options: torch.Tensor) -> float:
        values = gptq(weight, hessian, scheme, **options).q.dequantize()  # type: ignore[arg-type]
        return float((exact @ weight.T - quantized @ values.T).square().sum())

    assert error(P=pull) < 0.9 * error()


def test_with_equal_inputs_the_target_is_the_weight_itself() -> None:
    weight, hessian = layer(seed=4)
    order = torch.randperm(128)
    for pull in (None, torch.zeros(weight.T.shape)):
        wanted = aim_at_float(weight, factor_in(order, hessian), order, pull)
        assert torch.equal(wanted, weight.T[order])


def test_the_target_is_where_the_slope_of_the_quadratic_is_zero() -> None:
    weight, hessian = layer(seed=4, inputs=700)  # more than are solved for at a time
    order = torch.randperm(700, generator=torch.Generator().manual_seed(1))
    pull = hessian @ heavy_tailed((700, len(weight)), seed=2)
    factor = factor_in(order, hessian)
    moved = aim_at_float(weight, factor, order, pull.clone()) - weight.T[order]
    left = factor.restore() @ moved - pull[order]
    assert float(left.norm() / pull.norm()) < 1e-4


def test_the_root_is_of_the_inverse_in_its_order() -> None:
    _, hessian = layer(seed=4, inputs=700)  # more than are inverted at a time
    order = torch.randperm(700, generator=torch.Generator().manual_seed(1))
    factor = factor_in(order, hessian)
    root = factor.invert().triu().double()
    matrix = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(700)
    again = factor.restore()
    assert torch.allclose(again, matrix[order][:, order], rtol=1e-6)
    assert torch.allclose(root.T @ root @ again.double(), torch.eye(700).double(), atol=1e-3)


def test_a_factor_that_fails_half_way_is_tried_again_from_the_whole() -> None:
    x = rows(700, 700, seed=4)  # a square matrix: the smallest eigenvalue is about 0
    x /= x.norm(dim=0)
    hessian = x.T @ x - 0.04 * torch.eye(700)
    order = torch.randperm(700, generator=torch.Generator().manual_seed(1))
    factor = factor_in(order, hessian)
    assert factor.damping == pytest.approx(10 * DAMPING)
    u = factor.matrix.triu().double()
    assert torch.allclose(u @ u.T, factor.restore().double(), rtol=1e-4, atol=1e-4)
    below = hessian[order][:, order].tril(-1)
    assert torch.equal(factor.restore().tril(-1), below)


def test_a_dead_input_keeps_its_weight_in_the_target() -> None:
    weight, hessian = layer(seed=4)
    hessian[5], hessian[:, 5] = 0.0, 0.0
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    pull = -0.5 * hessian @ weight.T
    wanted = aim_at_float(weight, factor_in(order, hessian), order, pull)[order.argsort()]
    assert torch.equal(wanted[5], weight[:, 5])
    assert bool((wanted[:5] != weight.T[:5]).any())


def test_in_place_gives_the_same_codes_and_otherwise_nothing_is_overwritten() -> None:
    weight, hessian = layer(seed=6)
    pull = 0.1 * hessian @ heavy_tailed((128, len(weight)), seed=2)
    given = [t.clone() for t in (weight, hessian, pull)]
    kept = gptq(weight, hessian, Scheme(4, True, "group", 32), P=pull).q
    for now, before in zip((weight, hessian, pull), given, strict=True):
        assert torch.equal(now, before)
    used = gptq(weight, hessian, Scheme(4, True, "group", 32), P=pull, in_place=True).q
    assert torch.equal(used.integers, kept.integers)
    assert torch.equal(used.scale, kept.scale)
    assert torch.equal(weight, given[0])
    assert not torch.equal(hessian, given[1])


def test_rows_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = layer(seed=6)
    whole = gptq(weight, hessian, Scheme(4, False, "group", 32)).q
    monkeypatch.setattr("optimizer.compress.methods.weights.gptq.VALUES", 7 * weight.shape[1])
    parts = gptq(weight, hessian, Scheme(4, False, "group", 32)).q
    assert torch.equal(parts.integers, whole.integers)
    assert torch.equal(parts.scale, whole.scale)


def test_more_sweeps_never_raise_the_error() -> None:
    weight, hessian = layer(seed=6)
    scheme = Scheme(3, True, "group", 32)
    matrix = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian))
    errors = [
        loss(weight, with_constant("SWEEPS", n, weight, hessian, scheme).q.dequantize(), matrix)
        for n in range(4)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 0.99 * errors[0]


def test_a_hessian_that_factors_keeps_the_damping_asked_for() -> None:
    weight, hessian = layer()
    assert gptq(weight, hessian, Scheme(4), GptqOptions(damping=0.02)).damping == 0.02


def test_a_singular_hessian_gets_damping_that_is_recorded() -> None:
    weight = heavy_tailed((8, 64), seed=7)
    x = rows(5, 64, seed=8)
    made = gptq(weight, x.T @ x, Scheme(4), GptqOptions(damping=1e-12))
    assert 0 < made.damping <= 1


def test_a_hessian_that_never_factors_is_refused() -> None:
    hessian = torch.eye(32) - 2 * torch.ones(32, 32)
    hessian.diagonal().fill_(1.0)
    with pytest.raises(ValueError, match="not positive"):
        gptq(heavy_tailed((8, 32), 1), hessian, Scheme(4))


@pytest.mark.parametrize("which", ["weight", "hessian", "P"])
def test_nan_is_refused_by_name(which: str) -> None:
    weight, hessian = layer()
    given = {"weight": weight, "hessian": hessian, "P": hessian @ weight.T}
    given[which][3, 3] = float("nan")
    with pytest.raises(ValueError, match=which):
        gptq(given["weight"], given["hessian"], Scheme(4), P=given["P"])


def test_a_module_that_saw_no_input_is_refused() -> None:
    with pytest.raises(ValueError, match="no input"):
        gptq(torch.ones(4, 8), torch.zeros(8, 8), Scheme(4))


def test_inputs_that_were_always_zero_are_rounded_to_nearest() -> None:
    weight, hessian = layer(seed=10)
    dead = [3, 40]
    hessian[dead], hessian[:, dead] = 0.0, 0.0
    found = gptq(weight, hessian, Scheme(4), P=-0.1 * hessian @ weight.T).q
    nearest = quantize(weight, found.scale, None, found.scheme)
    assert torch.equal(found.integers[:, dead], nearest.integers[:, dead])


def test_a_token_counts_for_no_more_than_the_limit_says() -> None:
    x = torch.cat([rows(99, 32, seed=1), 1e4 * rows(2, 32, seed=2), torch.zeros(1, 32)])
    before, after = x.norm(dim=1), (x * weigh_tokens(x, 4.0)).norm(dim=1)
    limit = 4 * before.median()
    assert torch.allclose(after, before.clamp(max=limit))
    assert bool((after[-3:-1] < before[-3:-1] / 100).all())


def test_the_first_token_of_a_text_stands_for_its_share_and_never_for_less_than_itself() -> None:
    real = torch.tensor([[True] * 40, [False] * 36 + [True] * 4, [False] * 40])
    weight = weigh_first_tokens(real, 0.2)[:, 0]
    assert len(weight) == 44
    assert bool((weight[[*range(1, 40), *range(41, 44)]] == 1).all())
    assert float(weight[0] ** 2 / (weight[:40] ** 2).sum()) == pytest.approx(0.2)
    assert float(weight[40]) == 1  # a quarter of its text as it is
    assert bool((weigh_first_tokens(real, 0.0) == 1).all())


@pytest.mark.parametrize(
    ("activations", "asked", "wanted"),
    [
        (None, None, True),
        ({"granularity": "token"}, None, True),
        ({"granularity": "tensor"}, None, False),
        ({"granularity": "tensor"}, True, True),
        (None, False, False),
    ],
)
def test_earlier_errors_are_made_up_for_unless_they_are_those_of_static_ranges(
    activations: dict[str, str] | None, asked: bool | None, wanted: bool
) -> None:
    given = {"methods": ("gptq",), "activations": activations, "gptq": {"float_target": asked}}
    assert Quantize.model_validate(given).float_reference is wanted


def test_a_few_massive_tokens_do_not_decide_over_all_others() -> None:
    weight, scheme = heavy_tailed((48, 64), 3), Scheme(4, True, "group", 32)
    exact, noise = rows(900, 64, seed=20), rows(900, 64, seed=21)
    for x in (exact, noise):
        x[:400:100] *= 1000  # the rest is held out
    drift = exact + 0.2 * noise
    errors = {}
    for limit in (4.0, 1e9):
        share = weigh_tokens(drift[:400], limit)
        x = drift[:400] * share
        q = gptq(weight, x.T @ x, scheme, P=x.T @ (exact[:400] * share - x) @ weight.T).q
        miss = exact[400:] @ weight.T - drift[400:] @ q.dequantize().T
        errors[limit] = float(miss.norm())
    assert errors[4.0] < 0.9 * errors[1e9]


def test_no_scale_is_wider_than_the_limit_however_far_the_target_lies() -> None:
    weight, hessian = layer()
    scheme = Scheme(4, True, "group", 32)
    cover, _ = absmax_scale(weight, scheme)
    pull = 3 * hessian @ weight.T
    widest = {}
    for limit in (1.5, 100.0):
        q = gptq(weight, hessian, scheme, GptqOptions(max_scale_ratio=limit), P=pull).q
        widest[limit] = float(q.scale.div(cover).max())
    assert widest[1.5] <= 1.5 * 1.01 < widest[100.0]
