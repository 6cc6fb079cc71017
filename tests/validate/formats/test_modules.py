"""Inputs that compressed-tensors rounds otherwise than the state are near a tie; a wrong scale is
seen in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torch import Tensor

from optimizer.compress.simulate import QuantLinear
from optimizer.foundation.qtensor import BLOCK, Scheme, absmax_scale, quantize
from optimizer.foundation.rounding import float4, float8
from optimizer.foundation.state import STATIC as STATIC_MODES
from optimizer.foundation.state import Range
from optimizer.validate.formats.modules import TOKEN_STEPS, _compare, _rounding, _ties
from tests.conftest import heavy_tailed

WIDTH = 4096
STATIC = QuantizationArgs(num_bits=8, symmetric=False, strategy="tensor")
PRESETS = {
    "token": "W8A8",
    "float8 tensor": "FP8",
    "float8 token": "FP8_DYNAMIC",
    "float8 group": "FP8_BLOCK",
    "float4 group": "NVFP4",
}
ARGS = {
    mode: preset_name_to_scheme(preset, ["Linear"]).input_activations
    for mode, preset in PRESETS.items()
}
CODES = torch.arange(256, dtype=torch.uint8).view(float8.DTYPE).float()
OF_FLOAT4 = torch.tensor([s * m for s in (-1.0, 1.0) for m in float4.MAGNITUDES])
COVERED = Range.symmetric(3.3)
NUMBER = COVERED.float4_global_scale


def linear(covered: Range | None, mode: Any = "tensor") -> QuantLinear:
    weight = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    scheme = Scheme(8, granularity="channel")
    return QuantLinear(quantize(weight, *absmax_scale(weight, scheme), scheme), None, mode, covered)


def beside_ties(covered: Range) -> Tensor:
    """Values within a few float32 neighbours of the middle between two integers."""
    draw = torch.Generator().manual_seed(1)
    middles = torch.randint(
        -covered.zero_point, 255 - covered.zero_point, (8, WIDTH), generator=draw
    )
    away = torch.randint(-64, 65, (8, WIDTH), generator=draw)
    return (middles + 0.5 + away * 2.0**-23) * covered.scale


def flips(covered: Range, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(change of each value by the library's rounding, change that is allowed)."""
    module = linear(covered)
    rounded = _rounding(module, x)
    zero = torch.tensor([covered.zero_point - 128], dtype=torch.int8)
    theirs = fake_quantize(x, torch.tensor([scale]), zero, STATIC)
    return (theirs - rounded(x)).abs().double(), _ties(module, x, rounded)


@pytest.mark.parametrize("low", [0.0, -0.17, -3.0])
def test_a_flip_where_the_zero_point_is_added_before_the_rounding_is_allowed(low: float) -> None:
    covered = Range(low, 3.6)
    changed, allowed = flips(covered, beside_ties(covered), covered.scale)
    half = covered.scale / 2
    assert int((changed > half).sum()) > 100
    assert not bool(((changed > half) & (allowed < half)).any())


def test_a_flip_by_another_scale_is_not_allowed() -> None:
    covered = Range(-0.17, 3.6)
    x = torch.linspace(-0.17, 3.6, WIDTH)[None]
    changed, allowed = flips(covered, x, covered.scale * (1 + 2**-8))
    half = covered.scale / 2
    assert bool(((changed > half) & (allowed < half)).any())


def in_mode(mode: Any) -> QuantLinear:
    return linear(COVERED if mode in STATIC_MODES else None, mode)


def scale_of(mode: str, x: Tensor) -> Tensor:
    """Scale that the library takes for x (tokens, WIDTH)."""
    if mode == "float8 tensor":
        return torch.tensor([COVERED.float8_scale])
    scale: Tensor = compute_dynamic_scales_and_zp(
        x[None], ARGS[mode], torch.nn.Identity(), global_scale_of(mode)
    )[0]
    return scale


def global_scale_of(mode: str) -> Tensor | None:
    return torch.tensor([NUMBER]) if mode == "float4 group" else None


def theirs(mode: str, x: Tensor, scale: Tensor) -> Tensor:
    """x (tokens, WIDTH) rounded by the library."""
    zero, whole = torch.zeros_like(scale), global_scale_of(mode)
    rounded: Tensor = fake_quantize(x[None], scale, zero, ARGS[mode], whole)
    return rounded[0]


def beside_ties_in(mode: str) -> Tensor:
    """Values (tokens, WIDTH) within a few float32 neighbours of the middle between two that are
    exact, and the largest one in each group."""
    draw = torch.Generator().manual_seed(2)
    whole = {"token": torch.arange(-127.0, 128), "float4 group": OF_FLOAT4.unique()}
    codes = whole.get(mode, CODES[CODES.isfinite()].unique())
    size = float4.GROUP if mode == "float4 group" else BLOCK
    middles = (codes[1:] + codes[:-1]) / 2
    x = middles[torch.randint(len(middles), (32, WIDTH // size, size), generator=draw)]
    x = x * (1 + torch.randint(-32, 33, x.shape, generator=draw) * 2.0**-24)
    x[..., 0] = TOKEN_STEPS if mode == "token" else codes.max()
    scales = torch.randn(32, WIDTH // BLOCK if mode == "float8 group" else 1, 1, generator=draw)
    if mode == "float8 tensor":
        scales = torch.tensor(COVERED.float8_scale)
    if mode == "float4 group":
        drawn = NUMBER * torch.rand(32, WIDTH // size, 1, generator=draw) / 2
        scales = float8.nearest(drawn).float() / NUMBER
    return (x * scales).flatten(1)


@pytest.mark.parametrize("mode", ARGS)
def test_the_library_rounds_values_beside_ties_to_the_same_bits(mode: str) -> None:
    x = beside_ties_in(mode)
    module = in_mode(mode)
    assert torch.equal(theirs(mode, x, scale_of(mode, x)), _rounding(module, x)(x))
    same = torch.equal(module.quantize_input(x), _rounding(module, x)(x))
    assert same == (mode != "token")  # transformers divides the largest by 127.5, the state by 127


@pytest.mark.parametrize("mode", ARGS)
def test_a_flip_by_the_last_bit_of_a_scale_is_allowed(mode: str) -> None:
    x, module = beside_ties_in(mode), in_mode(mode)
    rounded = _rounding(module, x)
    values = rounded(x)
    for times in (1 + 2.0**-23, 1 - 2.0**-23):
        changed = (theirs(mode, x, scale_of(mode, x) * times) - values).abs().double()
        flipped = changed > 2.0**-22 * values.abs()  # others differ by the scale alone
        assert int(flipped.sum()) > 100
        assert bool((changed <= _ties(module, x, rounded) * (1 + 2.0**-18))[flipped].all())


@pytest.mark.parametrize("factor", [448 / 240, 1 + 2.0**-8])
@pytest.mark.parametrize("mode", ARGS)
def test_another_scale_is_out_of_the_bound_of_the_product(mode: str, factor: float) -> None:
    x, module = heavy_tailed((8, WIDTH), 3), in_mode(mode)
    for times, within in ((1.0, True), (factor, False)):
        rounded = theirs(mode, x, scale_of(mode, x) * times)
        output = torch.nn.functional.linear(rounded, module.weight)
        assert (_compare(module, x, output)[0][0] <= 1) == within
