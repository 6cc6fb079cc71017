"""Coordinate descent on integers and scales (CDQuant, arXiv 2406.17542).

For values Q and a target T the output error is tr (Q - T) H (Q - T)^T, with the gradient G = H (Q -
T). As a function of one integer it is a parabola, and the best integer is the nearest to its
minimum q_j - G_j / H_jj. As a function of one scale, with the integers c of its group fixed, the
minimum is at s - c G / c H c, rounded to the scale grid and taken where the error falls. No step
raises the error. Integers outside a mask stay at the zero point. A sweep updates G for the inputs
that it has yet to visit; the next one starts from a new G.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer.foundation.qtensor import QTensor, to_scale_grid


@dataclass(frozen=True)
class DescentBounds:
    """Bounds within which coordinate descent may move a rounded weight's scales and integers.

    scale: (least, largest) magnitudes, (out, groups) each, also for one scale per tensor
    mask: (out, in), False where the value stays 0
    """

    scale: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None


def refine(
    q: QTensor,
    T: Tensor,
    H: Tensor,
    bounds: DescentBounds = DescentBounds(),
    *,
    sweeps: int,
    block: int = 128,
) -> QTensor:
    """Improve the integers and scales of q by coordinate descent on the output error; zero points
    stay. Returns a new QTensor.

    T: (out, in)
    H: (in, in), with a positive diagonal
    sweeps: passes over all scales and inputs
    block: inputs updated together, see gptq.py
    """
    out, inputs = q.integers.shape
    groups = q.scale.shape[1]
    size = inputs // groups
    scale = q.scale.expand(out, groups).T.clone(memory_format=torch.contiguous_format)
    zero = torch.zeros_like(scale) if q.zero_point is None else _by_group(q.zero_point, out)
    integers = q.integers.T.float().contiguous()
    values = q.dequantize().T.contiguous()
    mask = None if bounds.mask is None else bounds.mask.T.contiguous()
    for _ in range(sweeps):
        G = H @ (values - T.T)
        for g in range(groups):
            group = slice(g * size, (g + 1) * size)
            levels = integers[group] - zero[g]
            new = _better_scale(levels, scale[g], G[group], H[group, group], q)
            if bounds.scale is not None:
                low, high = bounds.scale
                beyond = (new.abs() < low[:, g]) | (new.abs() > high[:, g])
                new = torch.where(beyond, scale[g], new)
            former = values[group].clone()
            G[group].addmm_(H[group, group], levels * (new - scale[g]))
            scale[g], values[group] = new, levels * new
            for start in range(group.start, group.stop, block):
                part = slice(start, min(start + block, group.stop))
                rest = slice(part.stop, group.stop)
                before = values[part].clone()
                at = _GroupPart(H[part, part], new, zero[g], None if mask is None else mask[part])
                integers[part] = _better_integers(values[part], G[part], at, q)
                values[part] = (integers[part] - zero[g]) * new
                G[rest].addmm_(H[rest, part], values[part] - before)
            G[group.stop :].addmm_(H[group.stop :, group], values[group] - former)
    return QTensor(
        integers.T.contiguous().to(torch.int8),
        scale.T[: len(q.scale)].contiguous(),
        q.zero_point,
        q.scheme,
    )


def _by_group(zero_point: Tensor, out: int) -> Tensor:
    return zero_point.float().expand(out, -1).T.contiguous()


def _better_scale(levels: Tensor, scale: Tensor, G: Tensor, H: Tensor, q: QTensor) -> Tensor:
    """Compute the scale (out,) of one group of a rounded weight that is best for its integers, with
    the sign it has.

    levels, G: (size, out)
    """
    first, second = (levels * G).sum(0), (levels * (H @ levels)).sum(0)
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
class _GroupPart:
    """Some inputs of one group of a rounded weight, whose integers are improved together: H
    (inputs, inputs), scale and zero (out,), mask (inputs, out)."""

    H: Tensor
    scale: Tensor
    zero: Tensor
    mask: Tensor | None


def _better_integers(values: Tensor, G: Tensor, at: _GroupPart, q: QTensor) -> Tensor:
    """Compute integers (inputs, out) of a part of a rounded weight's group, each in turn the best
    given all others."""
    G, integers = G.clone(), torch.empty_like(values)
    for i in range(len(values)):
        best = (values[i] - G[i] / at.H[i, i]) / at.scale + at.zero
        integers[i] = best.round_().clamp_(q.scheme.low, q.scheme.high)
        if at.mask is not None:
            integers[i] = torch.where(at.mask[i], integers[i], at.zero)
        G.addr_(at.H[i], (integers[i] - at.zero) * at.scale - values[i])
    return integers
