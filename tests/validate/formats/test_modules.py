"""Integers that compressed-tensors rounds otherwise than the state are near a tie."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from torch import Tensor

from optimizer.compress.simulate import QuantLinear
from optimizer.foundation.qtensor import Scheme, absmax_scale, quantize
from optimizer.foundation.state import Range
from optimizer.validate.formats.modules import _ties

WIDTH = 4096
STATIC = QuantizationArgs(num_bits=8, symmetric=False, strategy="tensor")


def linear(covered: Range) -> QuantLinear:
    weight = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    scheme = Scheme(8, granularity="channel")
    return QuantLinear(
        quantize(weight, *absmax_scale(weight, scheme), scheme), None, "tensor", covered
    )


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
    values = module.quantize_input(x)
    zero = torch.tensor([covered.zero_point - 128], dtype=torch.int8)
    theirs = fake_quantize(x, torch.tensor([scale]), zero, STATIC)
    return (theirs - values).abs().double(), _ties(module, x, values)


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
