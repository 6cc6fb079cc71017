"""Descend from given codes: change one code, or one scale, whenever that lowers the output error.

For values Q and a target T the error is tr (Q - T) H (Q - T)^T. As a function of one code it is a
parabola with its minimum at q_j - G_j / H_jj, G = H (Q - T); the best code is that one, rounded
(CDQuant, arXiv 2406.17542). As a function of one scale, with the codes c of its group kept, the
minimum is at s - c G / c H c; it is rounded to the scale grid and taken when the error falls. No
step raises the error, so the whole does not. Integers outside a mask stay at the zero point.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer.foundation.qtensor import QTensor, to_scale_grid


@dataclass(frozen=True)
class Bounds:
    """What the descent may not leave. scale: (least, most) magnitudes, each of the shape of q's
    scale, with a row per output also for one scale per tensor. mask (out, in): False where the
    value stays 0."""

    scale: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None


def refine(
    q: QTensor,
    target: Tensor,
    hessian: Tensor,
    bounds: Bounds = Bounds(),
    *,
    sweeps: int,
    block: int = 128,
) -> QTensor:
    """q with its codes and scales improved; zero points stay.

    target (out, in): T; hessian (in, in): H, with a positive diagonal. One sweep visits each scale
    and each input once. block: as in gptq, it changes the speed, not the result.
    """
    out, inputs = q.integers.shape
    groups = q.scale.shape[1]
    size = inputs // groups
    scale = q.scale.expand(out, groups).T.clone(memory_format=torch.contiguous_format)
    zero = torch.zeros_like(scale) if q.zero_point is None else _by_group(q.zero_point, out)
    codes = q.integers.T.float().contiguous()
    values = q.dequantize().T.contiguous()
    mask = None if bounds.mask is None else bounds.mask.T.contiguous()
    for _ in range(sweeps):
        slope = hessian @ (values - target.T)
        for g in range(groups):
            group = slice(g * size, (g + 1) * size)
            levels = codes[group] - zero[g]
            new = _better_scale(levels, scale[g], slope[group], hessian[group, group], q)
            if bounds.scale is not None:
                low, high = bounds.scale
                beyond = (new.abs() < low[:, g]) | (new.abs() > high[:, g])
                new = torch.where(beyond, scale[g], new)
            slope.addmm_(hessian[:, group], levels * (new - scale[g]))
            scale[g], values[group] = new, levels * new
            for start in range(group.start, group.stop, block):
                part = slice(start, min(start + block, group.stop))
                before = values[part].clone()
                place = _Place(
                    hessian[part, part], new, zero[g], None if mask is None else mask[part]
                )
                codes[part] = _better_codes(values[part], slope[part], place, q)
                values[part] = (codes[part] - zero[g]) * new
                slope.addmm_(hessian[:, part], values[part] - before)
    return QTensor(
        codes.T.contiguous().to(torch.int8),
        scale.T[: len(q.scale)].contiguous(),
        q.zero_point,
        q.scheme,
    )


def _by_group(zero_point: Tensor, out: int) -> Tensor:
    return zero_point.float().expand(out, -1).T.contiguous()


def _better_scale(levels: Tensor, scale: Tensor, slope: Tensor, h: Tensor, q: QTensor) -> Tensor:
    """The scale (out,) of one group that its codes would rather have, of the sign that it has.
    levels, slope (size, out)."""
    first, second = (levels * slope).sum(0), (levels * (h @ levels)).sum(0)
    if q.scheme.granularity == "tensor":
        first, second = first.sum().expand_as(first), second.sum().expand_as(second)
    usable = second > 0
    sign = scale.sign()
    least = scale - first / torch.where(usable, second, torch.ones_like(second))
    new = sign * to_scale_grid(sign * least)
    step = new - scale
    falls = usable & (2 * step * first + step.square() * second < 0)
    return torch.where(falls, new, scale)


@dataclass(frozen=True)
class _Place:
    """A part of a group: h (inputs, inputs), scale and zero (out,), mask (inputs, out)."""

    h: Tensor
    scale: Tensor
    zero: Tensor
    mask: Tensor | None


def _better_codes(values: Tensor, slope: Tensor, at: _Place, q: QTensor) -> Tensor:
    """Codes (inputs, out) of a part of a group, each in turn the best given all others."""
    slope, codes = slope.clone(), torch.empty_like(values)
    for i in range(len(values)):
        best = (values[i] - slope[i] / at.h[i, i]) / at.scale + at.zero
        codes[i] = best.round_().clamp_(q.scheme.low, q.scheme.high)
        if at.mask is not None:
            codes[i] = torch.where(at.mask[i], codes[i], at.zero)
        slope.addr_(at.h[i], (codes[i] - at.zero) * at.scale - values[i])
    return codes
