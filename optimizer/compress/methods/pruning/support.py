"""The best values of a matrix whose zeros are given, and better zeros.

The output error of values V against a target T is tr (V - T) D (V - T)^T, D = H with damping. With
the mask fixed it is least squares, an equation of its own per output; conjugate gradients with D's
diagonal solve all of them at once, one product with D a step, and every step lowers the error.

With N:M the mask itself can be improved: of each unit of M neighbours, given all the others, every
choice S of N has its best values in closed form, x_S = D_SS^-1 c_S with c = D_uu v - g (g the slope
at the unit), and lowers the error by c_S D_SS^-1 c_S. The best choice is taken, unit after unit, so
that the error only falls. Without a pattern of neighbours outputs swap weights: the pruned one that
would lower the error most for the kept one whose loss costs least, where that is a gain after both
were given their best values.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor

from optimizer.foundation.sparsity import Pattern

CLOSE = 1e-5
"""Of the error: conjugate gradients stop after a step that lowers it by less. What is then still to
be gained is a hundredth of what rounding to 4 bits costs (docs/decisions.md)."""
MOST = 256  # steps of conjugate gradients
CHOICES = 128
"""Of N in a unit of M that are tried one by one: 2:4 has 6, 4:8 has 70."""


def least_squares(T: Tensor, D: Tensor, mask: Tensor, start: Tensor, steps: int = MOST) -> Tensor:
    """V (out, in), 0 where mask (out, in) is False, with the least tr (V - T) D (V - T)^T, from
    `start` (out, in). D (in, in): symmetric, positive."""
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


def unit_choices(pattern: Pattern) -> list[tuple[int, ...]] | None:
    """Every N of M of the pattern, where they are few enough to be tried one by one."""
    if not pattern.of or math.comb(pattern.of, pattern.kept) > CHOICES:
        return None
    return list(combinations(range(pattern.of), pattern.kept))


def rechoose_units(
    values: Tensor, T: Tensor, D: Tensor, pattern: Pattern, sweeps: int = 1, block: int = 128
) -> Tensor:
    """values (out, in), N:M, with units chosen and valued anew, each given all others; the error
    never rises. T (out, in), D (in, in) as above. block: changes the speed, not the result."""
    kept = unit_choices(pattern)
    if kept is None:
        return values
    every = torch.tensor(kept)
    values = values.T.contiguous()
    unit, inputs = pattern.of, len(values)
    block = max(unit, block - block % unit)
    for _ in range(sweeps):
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
    """(unit, out): the values of the choice that lowers the error most. every (choices, kept)."""
    some = D[every[:, :, None], every[:, None, :]]
    parts = torch.linalg.solve(some, c[every])  # (choices, kept, out)
    gain = (parts * c[every]).sum(1)
    best = gain.argmax(0)
    out = torch.zeros_like(c)
    columns = torch.arange(c.shape[1])
    out[every[best].T, columns] = parts[best, :, columns].T
    return out


def swap_weights(values: Tensor, T: Tensor, D: Tensor, swaps: int) -> Tensor:
    """values (out, in), each output with one weight given up for another up to `swaps` times, while
    that lowers its error; as many zeros per output as before."""
    values = values.clone()
    mask = values != 0
    slope = (values - T) @ D
    diagonal = D.diagonal()
    rows = torch.arange(len(values))
    endless = torch.tensor(math.inf)
    for _ in range(swaps):
        # to give up v_j: the error changes by -2 v_j g_j + v_j^2 D_jj; to take in i: by -g_i^2/D_ii
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
