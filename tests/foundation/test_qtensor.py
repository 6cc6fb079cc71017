"""The laws of a quantized tensor, for any weight and any scheme."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optimizer.foundation import qtensor
from optimizer.foundation.qtensor import (
    FP16_LARGEST_BF16,
    FP16_SMALLEST_NORMAL,
    QTensor,
    Scheme,
    absmax_scale,
    divides,
    group_sizes,
    quantize,
    to_scale_grid,
)
from tests.conftest import heavy_tailed

schemes = st.builds(
    lambda bits, symmetric, form: Scheme(bits, symmetric, *form),
    st.sampled_from([3, 4, 8]),
    st.booleans(),
    st.sampled_from([("tensor", None), ("channel", None), ("group", 4), ("group", 8)]),
)
weights = st.builds(
    lambda out, eights, seed, scale: heavy_tailed((out, 8 * eights), seed, scale),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 10_000),
    st.sampled_from([1e-3, 0.05, 1.0, 100.0]),
)
quick = settings(max_examples=60, deadline=None)


def coded(weight: Tensor, scheme: Scheme) -> QTensor:
    return quantize(weight, *absmax_scale(weight, scheme), scheme)


@quick
@given(weights, schemes)
def test_a_value_is_at_most_half_a_step_away_unless_it_was_clipped(
    weight: Tensor, scheme: Scheme
) -> None:
    q = coded(weight, scheme)
    groups = q.scale.shape[1]
    step = q.scale.expand(len(weight), groups).repeat_interleave(weight.shape[1] // groups, 1)
    inside = (q.integers > scheme.low) & (q.integers < scheme.high)
    error = (weight - q.dequantize()).abs()
    assert bool((error <= 0.5001 * step)[inside].all())
    # the grid and the rounded zero point move an end of the range by less than one step
    assert bool((error <= 1.6 * step).all())


@quick
@given(weights, schemes)
def test_quantizing_again_changes_nothing(weight: Tensor, scheme: Scheme) -> None:
    q = coded(weight, scheme)
    again = quantize(q.dequantize(), q.scale, q.zero_point, scheme)
    assert torch.equal(again.integers, q.integers)


@quick
@given(weights, st.sampled_from([3, 4, 8]))
def test_negation_is_exact_when_symmetric(weight: Tensor, bits: int) -> None:
    scheme = Scheme(bits)
    assert torch.equal(coded(-weight, scheme).integers, -coded(weight, scheme).integers)


@quick
@given(weights, schemes)
def test_a_code_times_its_scale_is_the_same_number_in_every_float_type(
    weight: Tensor, scheme: Scheme
) -> None:
    q = coded(weight, scheme)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(q.scale.to(dtype).float(), q.scale)
    assert torch.equal(q.integers.float(), q.integers.to(torch.bfloat16).float())


@quick
@given(st.floats(0, 1e30))
def test_the_scale_grid_is_idempotent_and_close(scale: float) -> None:
    once = to_scale_grid(torch.tensor(scale))
    assert torch.equal(to_scale_grid(once), once)
    assert FP16_SMALLEST_NORMAL <= float(once) <= FP16_LARGEST_BF16
    if FP16_SMALLEST_NORMAL <= scale <= FP16_LARGEST_BF16:
        assert float(once) == pytest.approx(scale, rel=2**-8)


def test_zero_is_always_a_code() -> None:
    weight = heavy_tailed((4, 16), 3).abs() + 1
    weight[:, 0] = 0
    for symmetric in (True, False):
        assert not coded(weight, Scheme(4, symmetric)).dequantize()[:, 0].any()


GOOD = coded(heavy_tailed((4, 16), 1), Scheme(4, False, "group", 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"integers": GOOD.integers.int()}, "integers: torch.int32"),
        ({"integers": GOOD.integers + 8}, "integers: outside -8..7"),
        ({"scale": GOOD.scale[:, :1]}, "scale: .* must be float32"),
        ({"scale": GOOD.scale * 1.001}, "not on the bfloat16 grid"),
        ({"scale": -GOOD.scale}, "finite and positive"),
        ({"scale": GOOD.scale * float("nan")}, "finite and positive"),
        ({"zero_point": None}, "zero_point: missing"),
        ({"zero_point": GOOD.scale.to(torch.int8)[:1]}, "the shape of scale"),
        ({"scheme": Scheme(4, True, "group", 8)}, "zero_point: given"),
    ],
)
def test_a_broken_invariant_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GOOD, **change)  # type: ignore[arg-type]


def test_only_the_full_range_has_negative_scales_and_none_has_a_scale_of_zero() -> None:
    full = Scheme(4, True, "group", 8, full_range=True)
    q = coded(heavy_tailed((4, 16), 1), full)
    assert torch.equal(replace(q, scale=-q.scale).dequantize(), -q.dequantize())
    with pytest.raises(ValueError, match="finite and other than 0"):
        replace(q, scale=q.scale * 0)
    with pytest.raises(ValueError, match="finite and positive"):
        replace(q, scale=-q.scale.abs(), scheme=Scheme(4, True, "group", 8))
    for bits, symmetric in ((8, True), (4, False)):
        with pytest.raises(ValueError, match="full_range: true with bits"):
            Scheme(bits, symmetric, full_range=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(torch.tensor([[bad, 1.0]]), torch.ones(1, 1), None, Scheme(8))


def test_a_scheme_that_means_nothing_is_refused() -> None:
    for arguments in ((5,), (4, True, "group"), (4, True, "channel", 32), (4, True, "group", 0)):
        with pytest.raises(ValueError, match=r"bits|group_size"):
            Scheme(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sizes that do: 16, 32, 64"):
        Scheme(4, True, "group", 128).groups(576)


def test_a_group_size_divides_a_row_into_whole_groups() -> None:
    assert [divides(size, 96) for size in (None, 32, 96, 64, 192, 0)] == [True] * 3 + [False] * 3
    assert group_sizes(96) == [16, 32]
    assert group_sizes(7) == []


def test_slices_of_rows_are_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qtensor, "AT_ONCE", 3 * 32)
    weight = torch.randn(7, 32)
    scheme = Scheme(4, symmetric=False, granularity="group", group_size=16)
    q = quantize(weight, *absmax_scale(weight, scheme), scheme)
    assert [(at.start, at.stop) for at in q.slices()] == [(0, 3), (3, 6), (6, 7)]
    parts = [q.rows(at) for at in q.slices()]
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), q.dequantize())
    whole = Scheme(8, granularity="tensor")
    assert quantize(weight, *absmax_scale(weight, whole), whole).slices() == [slice(0, 7)]
