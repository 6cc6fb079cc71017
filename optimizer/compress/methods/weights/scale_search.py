"""Choose scales by the output error they lead to, tr (W - Q) H (W - Q)^T, rounding to nearest.

Group after group, each scale is the one of rtn's grid with the least output error given what the
other groups do at the moment. AWQ's clip search is this with the other groups taken as exact.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from optimizer.compress.methods.weights.rtn import centred_zero_point, search_scales, shrinks
from optimizer.foundation.qtensor import (
    QTensor,
    Scheme,
    absmax_scale,
    quantize,
    to_signed_scale_grid,
)


def search_output_scales(
    weight: Tensor, hessian: Tensor, scheme: Scheme, sweeps: int = 2
) -> QTensor:
    """weight (out, in) float32; hessian (in, in), the sum of x^T x over tokens. The output error
    is never above that of rtn.searched weighted by H's diagonal, where it starts.

    Raises ValueError for NaN or infinity in either.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise ValueError("hessian: holds NaN or infinity")
    inputs = weight.shape[1]
    groups = scheme.groups(inputs)
    start = search_scales(weight, scheme, hessian.diagonal())
    one = replace(scheme, granularity="channel", group_size=None) if groups > 1 else scheme
    parts = [slice(g * inputs // groups, (g + 1) * inputs // groups) for g in range(groups)]
    best = [_part(start, g, part, one) for g, part in enumerate(parts)]
    error = start.dequantize() - weight
    for _ in range(sweeps):
        for g, part in enumerate(parts):
            own = hessian[part, part]
            others = error @ hessian[:, part] - error[:, part] @ own
            best[g] = _best(weight[:, part], best[g], own, others)
            error[:, part] = best[g].dequantize() - weight[:, part]
    return QTensor(
        torch.cat([q.integers for q in best], 1),
        torch.cat([q.scale for q in best], 1),
        None if scheme.symmetric else torch.cat([_zero(q) for q in best], 1),
        scheme,
    )


def _best(weight: Tensor, now: QTensor, own: Tensor, others: Tensor) -> QTensor:
    """The best grid scale of one group: least e H e^T + 2 e others^T for its error e."""

    def cost(q: QTensor) -> Tensor:
        e = q.dequantize() - weight
        return ((e @ own + 2 * others) * e).reshape(q.scale.numel(), -1).sum(-1).view_as(q.scale)

    scheme = now.scheme
    full, full_zero = absmax_scale(weight, scheme)
    scale, zero_point, least = now.scale, now.zero_point, cost(now)
    for shrink in shrinks(scheme):
        trial = to_signed_scale_grid(full * shrink)
        zero = full_zero if shrink == 1 else centred_zero_point(weight, trial, scheme)
        error = cost(quantize(weight, trial, zero, scheme))
        better = error < least
        least, scale = torch.where(better, error, least), torch.where(better, trial, scale)
        if zero_point is not None and zero is not None:
            zero_point = torch.where(better, zero, zero_point)
    return quantize(weight, scale, zero_point, scheme)


def _part(q: QTensor, g: int, part: slice, scheme: Scheme) -> QTensor:
    zero = None if q.zero_point is None else q.zero_point[:, g : g + 1]
    return QTensor(q.integers[:, part], q.scale[:, g : g + 1], zero, scheme)


def _zero(q: QTensor) -> Tensor:
    assert q.zero_point is not None
    return q.zero_point
