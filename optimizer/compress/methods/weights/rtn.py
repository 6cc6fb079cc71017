"""Round to nearest: weight (out, in), scheme -> QTensor.

INT8 scales cover their values exactly (absmax), because clipping gains nothing at so fine a step.
At 3 and 4 bits each scale is searched: of a grid of smaller scales, the one with the least squared
error of its values. The error never rises, because absmax is in the grid. Scales of either sign
(full_range) are tried with both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizer.foundation.qtensor import (
    QTensor,
    Scheme,
    absmax_scale,
    quantize,
    to_signed_scale_grid,
)

SHRINKS = tuple(1 - 0.025 * i for i in range(17))  # 1.0 down to 0.6


def rtn(weight: Tensor, scheme: Scheme) -> QTensor:
    """Round weight (out, in) float32 to nearest.

    Raises ValueError for NaN, infinity, or a group that does not divide the inputs.
    """
    weight = weight.float()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight: holds NaN or infinity")
    if scheme.bits == 8:
        return quantize(weight, *absmax_scale(weight, scheme), scheme)
    return search_scales(weight, scheme)


def search_scales(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> QTensor:
    """Round to nearest with each scale searched for the least squared error of its values.

    importance: (in,), not negative, weight of a squared error at each input; None: 1 everywhere
    """
    full = quantize(weight, *absmax_scale(weight, scheme), scheme)
    scale, zero_point = full.scale, full.zero_point
    best = _error(weight, full, importance)
    for shrink in shrinks(scheme)[1:]:
        trial_scale = to_signed_scale_grid(full.scale * shrink)
        trial_zero = center_zero_point(weight, trial_scale, scheme)
        error = _error(weight, quantize(weight, trial_scale, trial_zero, scheme), importance)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, trial_scale, scale)
        if zero_point is not None and trial_zero is not None:
            zero_point = torch.where(better, trial_zero, zero_point)
    return quantize(weight, scale, zero_point, scheme)


def shrinks(scheme: Scheme) -> tuple[float, ...]:
    """Factors of the absmax scale that are tried in turn; the first is 1."""
    return (*SHRINKS, *(-s for s in SHRINKS)) if scheme.full_range else SHRINKS


def candidates(weight: Tensor, scheme: Scheme) -> Tensor:
    """All scales that `rtn` chooses from, (shrinks, *shape of scale)."""
    full, _ = absmax_scale(weight, scheme)
    tried = (1.0,) if scheme.bits == 8 else shrinks(scheme)
    return torch.stack([to_signed_scale_grid(full * shrink) for shrink in tried])


def center_zero_point(weight: Tensor, scale: Tensor, scheme: Scheme) -> Tensor | None:
    """Zero point of a smaller scale, which centres its window on the entire range; None where
    symmetric."""
    if scheme.symmetric:
        return None
    rows = weight.reshape(scale.numel(), -1)
    low, high = rows.amin(-1).clamp(max=0), rows.amax(-1).clamp(min=0)
    middle = ((low + high) / 2).reshape(scale.shape)
    zero = ((scheme.low + scheme.high) / 2 - middle / scale).round()
    return zero.clamp(scheme.low, scheme.high).to(torch.int8)


def _error(weight: Tensor, q: QTensor, importance: Tensor | None) -> Tensor:
    """Squared error of each scale's values, in the shape of the scale."""
    squares = (weight - q.dequantize()).square()
    if importance is not None:
        squares = squares * importance
    return squares.reshape(q.scale.numel(), -1).sum(-1).view_as(q.scale)


def relative_error(weight: Tensor, approximation: Tensor) -> float:
    """Frobenius norm of the difference / norm of the weight; 0 for a weight of zeros."""
    norm = float(weight.norm())
    return float((weight - approximation).norm()) / norm if norm else 0.0
