"""Fake quantization with gradients, in the arithmetic of the compressed state.

Forward, results equal the state's de-quantization bit for bit (qtensor.QTensor, state.Range,
compress/simulate.py). Backward, rounding is the identity (the straight-through estimator, Bengio et
al. 2013, arXiv 1308.3432) and other operations have their own gradient, so that a scale gets that
of LSQ (Esser et al. 2020, arXiv 1902.08153): inside the integers' range round(w / s) - w / s,
outside it the nearest end.

Scales and ranges are learned as logarithms of the ratio to their start, so that steps are relative
and no scale becomes negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizer.foundation.qtensor import (
    QTensor,
    Scheme,
    quantize,
    to_scale_grid,
    to_signed_scale_grid,
)
from optimizer.foundation.state import Range


def exactly(value: Tensor, gradient_of: Tensor) -> Tensor:
    """Return `value` bit for bit, with the gradient of `gradient_of`. (Adding a detached difference
    would round.)"""
    return _Exactly.apply(value, gradient_of)  # type: ignore[no-any-return]


def round_through(x: Tensor) -> Tensor:
    """Round x to nearest, ties to even; in the backward pass the gradient goes through
    unchanged."""
    return exactly(x.detach().round(), x)


class _Exactly(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, value: Tensor, _gradient_of: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: object, *above: Tensor) -> tuple[None, Tensor]:
        return None, above[0]


def scale_of(start: Tensor, logarithm: Tensor) -> Tensor:
    """Return the scale start * exp(logarithm), rounded to the scale grid."""
    free = start * logarithm.exp()
    return exactly(to_signed_scale_grid(free.detach()), free)


def quantize_weight(weight: Tensor, scale: Tensor, start: QTensor) -> QTensor:
    """Quantize the weight by these scales, with start's scheme and zero points."""
    return quantize(weight.detach(), scale.detach(), start.zero_point, start.scheme)


def fake_quantize_weight(weight: Tensor, scale: Tensor, start: QTensor) -> Tensor:
    """Quantize and de-quantize a weight (out, in), with gradients for weight and scale."""
    scheme: Scheme = start.scheme
    out, inputs = weight.shape
    groups = scale.shape[1]
    steps = weight.reshape(out, groups, -1) / scale.expand(out, groups)[..., None]
    zero = scale.new_zeros(()) if start.zero_point is None else start.zero_point.float()
    zero = zero.expand(out, groups)[..., None]
    inside = round_through(steps).clamp(scheme.low - zero, scheme.high - zero)
    free = (inside * scale.expand(out, groups)[..., None]).reshape(out, inputs)
    return exactly(quantize_weight(weight, scale, start).dequantize(), free)


def start_logarithms(start: Range) -> Tensor:
    """Initial logarithms, zeros: two, for the low and high end of a range, or one for a symmetric
    range, which stays symmetric."""
    symmetric = start == Range(-128 * start.scale, 127 * start.scale)
    return torch.zeros(1 if symmetric else 2)


def scale_range(start: Range, logarithms: Tensor) -> Range:
    """Multiply the ends of `start` by exp(logarithms): low and high, or both alike."""
    factors = logarithms.detach().double().exp()
    if len(factors) == 1:
        grown = torch.tensor(start.scale * float(factors[0]))
        scale = float(to_scale_grid(grown))
        return Range(-128 * scale, 127 * scale)
    return Range(start.low * float(factors[0]), start.high * float(factors[1]))


def fake_quantize_activation(x: Tensor, start: Range, logarithms: Tensor) -> Tensor:
    """Quantize and de-quantize x (..., features) by scale_range(start, logarithms), with gradients
    for x and the logarithms."""
    covered = scale_range(start, logarithms)
    low, high = start.low * logarithms[0].exp(), start.high * logarithms[-1].exp()
    scale = exactly(torch.tensor(covered.scale, dtype=x.dtype).to(x.device), (high - low) / 255)
    zero = torch.tensor(float(covered.zero_point)).to(x.device)
    if len(logarithms) == 2:
        zero = exactly(zero, -low / scale)
    inside = (round_through(x / scale) + zero).clamp(0, 255)
    return (inside - zero) * scale


def fake_quantize_tokens(x: Tensor) -> Tensor:
    """Quantize and de-quantize each row of x (..., features) to int8 by its largest value; the
    scale takes no gradient."""
    scale = x.detach().abs().amax(-1, keepdim=True) / 127
    return round_through(x / torch.where(scale > 0, scale, torch.ones_like(scale))) * scale
