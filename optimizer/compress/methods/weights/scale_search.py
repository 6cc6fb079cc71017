"""Search scales by the output error tr (W - Q) H (W - Q)^T, rounding to nearest.

Group after group gets the scale of rtn's grid with the least output error, given the present scales
of the other groups. (AWQ's clip search takes the other groups as exact.)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from optimizer.compress.methods.weights.rtn import center_zero_point, list_shrinks, search_scales
from optimizer.foundation.qtensor import (
    QTensor,
    Scheme,
    absmax_scale,
    quantize,
    to_signed_scale_grid,
)


def search_output_scales(W: Tensor, H: Tensor, scheme: Scheme, sweeps: int = 2) -> QTensor:
    """Quantize W (out, in) float32 to nearest with scales searched by output error, with H (in, in)
    the sum of x^T x over tokens.

    It starts from rtn.search_scales weighted by H's diagonal, and the output error never rises.
    Raises ValueError for NaN or infinity in either.
    """
    if not bool(torch.isfinite(H).all()):
        raise ValueError("hessian: holds NaN or infinity")
    inputs = W.shape[1]
    groups = scheme.groups(inputs)
    start = search_scales(W, scheme, H.diagonal())
    one = replace(scheme, granularity="channel", group_size=None) if groups > 1 else scheme
    parts = [slice(g * inputs // groups, (g + 1) * inputs // groups) for g in range(groups)]
    best = [_part(start, g, part, one) for g, part in enumerate(parts)]
    error = start.dequantize() - W
    for _ in range(sweeps):
        for g, part in enumerate(parts):
            H_part = H[part, part]
            others = error @ H[:, part] - error[:, part] @ H_part
            best[g] = _best(W[:, part], best[g], H_part, others)
            error[:, part] = best[g].dequantize() - W[:, part]
    return QTensor(
        torch.cat([q.integers for q in best], 1),
        torch.cat([q.scale for q in best], 1),
        None if scheme.symmetric else torch.cat([_zero(q) for q in best], 1),
        scheme,
    )


def _best(W: Tensor, now: QTensor, H: Tensor, others: Tensor) -> QTensor:
    """One group W, quantized by the grid scale of least e H e^T + 2 e others^T for its error e.

    H: (size, size), of the group
    others: (out, size), errors of the other groups times H
    """

    def cost(q: QTensor) -> Tensor:
        e = q.dequantize() - W
        return ((e @ H + 2 * others) * e).reshape(q.scale.numel(), -1).sum(-1).view_as(q.scale)

    scheme = now.scheme
    full, full_zero = absmax_scale(W, scheme)
    scale, zero_point, least = now.scale, now.zero_point, cost(now)
    for shrink in list_shrinks(scheme):
        trial = to_signed_scale_grid(full * shrink)
        zero = full_zero if shrink == 1 else center_zero_point(W, trial, scheme)
        error = cost(quantize(W, trial, zero, scheme))
        better = error < least
        least, scale = torch.where(better, error, least), torch.where(better, trial, scale)
        if zero_point is not None and zero is not None:
            zero_point = torch.where(better, zero, zero_point)
    return quantize(W, scale, zero_point, scheme)


def _part(q: QTensor, g: int, part: slice, scheme: Scheme) -> QTensor:
    zero = None if q.zero_point is None else q.zero_point[:, g : g + 1]
    return QTensor(q.integers[:, part], q.scale[:, g : g + 1], zero, scheme)


def _zero(q: QTensor) -> Tensor:
    assert q.zero_point is not None
    return q.zero_point
