"""Round to nearest: weight (out, in), scheme -> QTensor.

INT8 scales cover their values exactly (absmax), because clipping gains nothing at so fine a step,
and so do those of FP8 (docs/decisions/0055).
At 3 and 4 bits each scale is searched: of a grid of smaller scales, the one with the least squared
error of its values. The error never rises, because absmax is in the grid. Scales of either sign
(full_range) are tried with both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optimizer.foundation.qtensor import (
    BLOCK,
    QTensor,
    Scheme,
    absmax_scale,
    quantize,
    round_to,
    scheme_scales,
    stack,
)

SHRINKS = tuple(1 - 0.025 * i for i in range(17))  # 1.0 down to 0.6
TOGETHER = 1 << 18  # values whose temporaries stay in the processor's cache
TOGETHER_ON_GPU = 1 << 26  # values whose temporaries take about a gigabyte


def rtn(weight: Tensor, scheme: Scheme) -> QTensor:
    """Round weight (out, in) float32 to nearest.

    Raises ValueError for NaN, infinity, a weight that FP4 does not hold, or a group that does not
    divide the inputs.
    """
    if scheme.bits == 8:
        return stack((_cover(w.float(), scheme) for w in _parts(weight, scheme)), len(weight))
    return search_scales(weight, scheme)


def search_scales(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> QTensor:
    """Round to nearest with each scale searched for the least squared error of its values.

    importance: (in,), not negative, weight of a squared error at each input; None: 1 everywhere
    """
    parts = (_search(w.float(), scheme, importance) for w in _parts(weight, scheme))
    return stack(parts, len(weight))


def _parts(weight: Tensor, scheme: Scheme) -> Sequence[Tensor]:
    """Divide a weight into rows that are rounded together; all of them where they share one
    scale."""
    if scheme.granularity == "tensor":
        return [weight]
    together = TOGETHER if weight.device.type == "cpu" else TOGETHER_ON_GPU
    rows = max(1, together // max(1, weight.shape[1]))
    if scheme.granularity == "block":
        rows = max(BLOCK, rows - rows % BLOCK)
    parts: Sequence[Tensor] = weight.split(rows)
    return parts


def _cover(weight: Tensor, scheme: Scheme) -> QTensor:
    return quantize(weight, *absmax_scale(weight, scheme), scheme)


def _search(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> QTensor:
    """Round a weight with the scale, out of list_shrinks, whose integers have the least squared
    error."""
    full = _cover(weight, scheme)
    scale, zero_point = full.scale, full.zero_point
    best = _error(weight, scale, zero_point, scheme, importance)
    for shrink in list_shrinks(scheme)[1:]:
        trial_scale = scheme_scales(full.scale * shrink, scheme)
        trial_zero = center_zero_point(weight, trial_scale, scheme)
        error = _error(weight, trial_scale, trial_zero, scheme, importance)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, trial_scale, scale)
        if zero_point is not None and trial_zero is not None:
            zero_point = torch.where(better, trial_zero, zero_point)
    return quantize(weight, scale, zero_point, scheme)


def list_shrinks(scheme: Scheme) -> tuple[float, ...]:
    """List the factors of the absmax scale that rounding tries for each scale; the first is 1."""
    return (*SHRINKS, *(-s for s in SHRINKS)) if scheme.full_range else SHRINKS


def list_scales(weight: Tensor, scheme: Scheme) -> Tensor:
    """List all scales that `rtn` chooses from, (shrinks, *shape of scale)."""
    full, _ = absmax_scale(weight, scheme)
    tried = (1.0,) if scheme.bits == 8 else list_shrinks(scheme)
    return torch.stack([scheme_scales(full * shrink, scheme) for shrink in tried])


def center_zero_point(weight: Tensor, scale: Tensor, scheme: Scheme) -> Tensor | None:
    """Choose the zero point of a rounded weight's smaller scale, which centres its window on the
    entire range; None where symmetric."""
    if scheme.symmetric:
        return None
    rows = weight.reshape(scale.numel(), -1)
    low, high = rows.amin(-1).clamp(max=0), rows.amax(-1).clamp(min=0)
    middle = ((low + high) / 2).reshape(scale.shape)
    zero = ((scheme.low + scheme.high) / 2 - middle / scale).round()
    return zero.clamp(scheme.low, scheme.high).to(torch.int8)


def _error(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    scheme: Scheme,
    importance: Tensor | None,
) -> Tensor:
    """Compute the squared error of rounding by each scale, in the shape of the scale, by the
    operations of `quantize` and `dequantize` in one new matrix."""
    W, s = weight.reshape(*scale.shape, -1), scale[..., None]
    E = W / s
    if scheme.is_float:
        E = round_to(E, scheme).float()
    elif zero_point is None:
        E.round_().clamp_(scheme.low, scheme.high)
    else:
        zero = zero_point.float()[..., None]
        E.add_(zero).round_().clamp_(scheme.low, scheme.high).sub_(zero)
    E.mul_(s).sub_(W).square_()
    if importance is not None:
        E.view(weight.shape).mul_(importance)
    return E.sum(-1)


def measure_relative_error(weight: Tensor, approximation: Tensor) -> float:
    """Measure the error of a compressed weight: Frobenius norm of the difference / norm of the
    weight; 0 for a weight of zeros."""
    norm = float(weight.norm())
    return float((weight - approximation).norm()) / norm if norm else 0.0
