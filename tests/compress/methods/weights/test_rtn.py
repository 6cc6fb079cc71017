"""Round to nearest, per scheme."""

from __future__ import annotations

import pytest
import torch

from optimizer.compress.methods.weights.rtn import measure_relative_error, rtn, search_scales
from optimizer.foundation.qtensor import Scheme, absmax_scale, quantize
from tests.conftest import heavy_tailed

SCHEMES = [
    Scheme(8),
    Scheme(8, granularity="tensor"),
    Scheme(8, granularity="group", group_size=16),
    Scheme(8, symmetric=False),
    Scheme(4, granularity="group", group_size=32),
    Scheme(4, symmetric=False, granularity="group", group_size=32),
    Scheme(3, granularity="group", group_size=32),
    Scheme(4, granularity="tensor"),
    Scheme(4, True, "group", 32, full_range=True),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rows_rounded_together_are_as_rounded_alone(
    scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = heavy_tailed((24, 64), seed=1)
    whole = rtn(weight, scheme)
    monkeypatch.setattr("optimizer.compress.methods.weights.rtn.TOGETHER", 5 * 64)
    parts = rtn(weight, scheme)
    assert torch.equal(whole.integers, parts.integers)
    assert torch.equal(whole.scale, parts.scale)
    assert (whole.zero_point is None) == (parts.zero_point is None)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_searching_the_scale_never_raises_the_error(scheme: Scheme) -> None:
    weight = heavy_tailed((24, 64), seed=1)
    plain = quantize(weight, *absmax_scale(weight, scheme), scheme)
    error = measure_relative_error(weight, rtn(weight, scheme).dequantize())
    assert error <= measure_relative_error(weight, plain.dequantize())


def test_searching_clearly_helps_four_bits() -> None:
    weight, scheme = heavy_tailed((64, 256), seed=2), Scheme(4)
    plain = measure_relative_error(
        weight, quantize(weight, *absmax_scale(weight, scheme), scheme).dequantize()
    )
    assert measure_relative_error(weight, rtn(weight, scheme).dequantize()) < 0.9 * plain


def test_more_bits_and_finer_scales_are_never_worse() -> None:
    weight = heavy_tailed((32, 128), seed=3)

    def error(*args: object) -> float:
        return measure_relative_error(weight, rtn(weight, Scheme(*args)).dequantize())  # type: ignore[arg-type]

    assert error(8) < error(4) < error(3)
    assert (
        error(4, True, "group", 16)
        < error(4, True, "group", 64)
        < error(4)
        < error(4, True, "tensor")
    )


def test_the_full_range_is_finer_and_spends_the_lowest_code_on_the_largest_value() -> None:
    weight = heavy_tailed((64, 256), seed=5)
    restricted, full = (Scheme(4, True, "group", 32, full_range=f) for f in (False, True))
    errors = [
        measure_relative_error(weight, rtn(weight, s).dequantize()) for s in (restricted, full)
    ]
    assert errors[1] < 0.95 * errors[0]
    scale, _ = absmax_scale(weight, full)
    q = quantize(weight, scale, None, full)
    furthest = weight.reshape(64, 8, 32).abs().argmax(-1)[..., None]
    lowest = q.integers.reshape(64, 8, 32).gather(-1, furthest)
    assert bool((lowest <= -7).all())
    assert set(scale.sign().unique().tolist()) == {-1, 1}
    assert int(lowest.min()) == -8


def test_a_weight_and_its_negative_have_the_same_codes_in_the_full_range() -> None:
    weight, scheme = heavy_tailed((16, 64), seed=6), Scheme(4, True, "group", 32, full_range=True)
    q, mirrored = rtn(weight, scheme), rtn(-weight, scheme)
    assert torch.equal(q.integers, mirrored.integers)
    assert torch.equal(q.scale, -mirrored.scale)


@pytest.mark.parametrize("bits", [4, 8])
def test_where_a_large_value_does_not_matter_the_searched_scale_is_smaller(bits: int) -> None:
    """Round to nearest does not search in 8 bits; gptq and awq, which know what matters, do."""
    weight = heavy_tailed((16, 64), seed=7)
    weight[:, 0] = 1.5 * weight.abs().amax(1)
    importance = torch.ones(64)
    importance[0] = 0.0
    full, _ = absmax_scale(weight, Scheme(bits))
    assert bool((search_scales(weight, Scheme(bits), importance).scale < full).all())


def test_an_already_quantized_weight_comes_back_exactly() -> None:
    once = rtn(heavy_tailed((16, 64), seed=4), Scheme(8)).dequantize()
    assert torch.equal(rtn(once, Scheme(8)).dequantize(), once)


def test_a_weight_of_zeros_stays_zero() -> None:
    assert not rtn(torch.zeros(4, 32), Scheme(4, False, "group", 16)).dequantize().any()


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        rtn(torch.tensor([[1.0, float("nan")]]), Scheme(8))
