"""Find the best values of a weight with given zeros, and better zeros.

The output error of values V against a target T is tr (V - T) D (V - T)^T, D = H with damping. With
the mask fixed it is least squares, an equation of its own per output; conjugate gradients with D's
diagonal solve all of them at once, one product with D a step, and every step lowers the error.

With N:M the mask can be improved too: in each unit of M neighbours, given all others, every choice
S of N has its best values in closed form, x_S = D_SS^-1 c_S with c = D_uu v - g (g the gradient at
the unit), and lowers the error by c_S D_SS^-1 c_S. Unit after unit gets the best choice, so that
the error never rises. In an unstructured pattern outputs swap weights: the pruned one that would
lower the error most for the remaining one whose loss costs least, where that lowers the error.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor

from optimizer.foundation.sparsity import Pattern

CLOSE = 1e-5
"""Share of the error: conjugate gradients stop after a step that lowers it by less. The rest is a
hundredth of the cost of rounding to 4 bits (docs/decisions/0003)."""
MOST = 256  # largest number of steps of conjugate gradients
CHOICES = 128
"""Largest number of choices N of M that are tried one by one: 2:4 has 6, 4:8 has 70."""


def solve_least_squares(
    T: Tensor, D: Tensor, mask: Tensor, start: Tensor, steps: int = MOST
) -> Tensor:
    """Find the best values of a pruned weight: V (out, in) with the least tr (V - T) D (V - T)^T, 0
    where mask (out, in) is False.

    D: (in, in), symmetric, positive definite
    start: (out, in), where conjugate gradients begin
    """
    keep, diagonal = mask.to(T.dtype), D.diagonal()
    values = start * keep
    residual = (T - values) @ D
    error = float((residual * (T - values)).sum())
    residual *= keep
    scaled = residual / diagonal
    direction, along = scaled, (residual * scaled).sum(1, keepdim=True)
    for _ in range(steps):
        bent = (direction @ D) * keep
        curve = (direction * bent).sum(1, keepdim=True)
        step = torch.where(curve > 0, along / curve, torch.zeros_like(curve))
        values = values + step * direction
        fallen = float((step * along).sum())
        error -= fallen
        if not fallen > CLOSE * error:
            break
        residual = residual - step * bent
        scaled = residual / diagonal
        before, along = along, (residual * scaled).sum(1, keepdim=True)
        ratio = torch.where(before > 0, along / before, torch.zeros_like(before))
        direction = scaled + ratio * direction
    return values


def list_unit_choices(pattern: Pattern) -> list[tuple[int, ...]] | None:
    """List all choices N of M of the sparsity pattern; None where they are more than CHOICES."""
    if not pattern.of or math.comb(pattern.of, pattern.kept) > CHOICES:
        return None
    return list(combinations(range(pattern.of), pattern.kept))


def rechoose_units(
    values: Tensor, T: Tensor, D: Tensor, pattern: Pattern, block: int = 128
) -> Tensor:
    """Improve a pruned weight: values (out, in) with the mask and values of each N:M unit chosen
    anew, given all others.

    The error never rises. block: inputs updated together; it changes the speed, not the result.
    """
    kept = list_unit_choices(pattern)
    if kept is None:
        return values
    every = torch.tensor(kept, device=values.device)
    values = values.T.contiguous()
    unit, inputs = pattern.of, len(values)
    block = max(unit, block - block % unit)
    slope = D @ (values - T.T)
    for start in range(0, inputs, block):
        part = slice(start, min(start + block, inputs))
        before, local = values[part].clone(), slope[part].clone()
        for first in range(start, part.stop, unit):
            u, inner = slice(first, first + unit), slice(first - start, first - start + unit)
            c = D[u, u] @ values[u] - local[inner]
            best = _best(c, D[u, u], every)
            moved = best - values[u]
            values[u] = best
            local.addmm_(D[part, u], moved)
        slope.addmm_(D[:, part], values[part] - before)
    return values.T.contiguous()


def _best(c: Tensor, D: Tensor, every: Tensor) -> Tensor:
    """Compute values (unit, out) of the choice of kept weights that lowers the pruning error most,
    per output.

    c: right-hand sides of the normal equations D v = c (unit, out)
    every: inputs of the unit that each choice keeps (choices, kept)
    """
    some = D[every[:, :, None], every[:, None, :]]
    parts = torch.linalg.solve(some, c[every])  # (choices, kept, out)
    gain = (parts * c[every]).sum(1)
    best = gain.argmax(0)
    out = torch.zeros_like(c)
    columns = torch.arange(c.shape[1], device=c.device)
    out[every[best].T, columns] = parts[best, :, columns].T
    return out


def swap_weights(values: Tensor, T: Tensor, D: Tensor, swaps: int) -> Tensor:
    """Swap pruned and remaining weights of each output up to `swaps` times, while its error falls.

    The number of zeros per output stays.
    """
    values = values.clone()
    mask = values != 0
    slope = (values - T) @ D
    diagonal = D.diagonal()
    rows = torch.arange(len(values), device=values.device)
    endless = torch.tensor(math.inf, device=values.device)
    for _ in range(swaps):
        # pruning v_j changes the error by -2 v_j g_j + v_j^2 D_jj, restoring i by -g_i^2 / D_ii
        cost = torch.where(mask, values * (values * diagonal - 2 * slope), endless)
        out = cost.argmin(1)
        lost = values[rows, out]
        after = slope - lost[:, None] * D[out]
        gain = torch.where(mask, -endless, after.square() / diagonal)
        into = gain.argmax(1)
        better = cost[rows, out] < gain[rows, into]
        if not bool(better.any()):
            break
        taken = -after[rows, into] / diagonal[into]
        r, i, j = rows[better], into[better], out[better]
        slope[r] = after[better] + taken[better, None] * D[i]
        values[r, j], values[r, i] = 0.0, taken[better]
        mask[r, j], mask[r, i] = False, True
    return values
