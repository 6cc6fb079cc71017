"""SparseGPT (Frantar and Alistarh 2023, arXiv 2301.00774): prune the inputs of a weight one after
another and move each error onto later inputs.

As in compress/methods/weights/gptq.py, H^-1 = Hinv^T Hinv with Hinv upper triangular, and pruning
w_j costs (w_j / Hinv_jj)^2. The mask is chosen during the sweep, on the present values:

    N:M           in each unit u, the choice S to prune with the least cost of pruning all of S,
                  w_S ((Hinv_uu^T Hinv_uu)_SS)^-1 w_S
    unstructured  at every block of inputs, per output: of the remaining inputs, the cheapest that
                  are still to be pruned; those in the block are pruned (the paper prunes an equal
                  share of each block instead)

The remaining weights then get the best values on their support, which is improved while the error
falls (support.py). The target T may correct errors of earlier blocks, as in gptq.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from optimizer.compress.methods.pruning.support import (
    MOST,
    list_unit_choices,
    rechoose_units,
    solve_least_squares,
    swap_weights,
)
from optimizer.compress.methods.weights.factorization import PART, factorize, permute
from optimizer.compress.methods.weights.gptq import BLOCK, rows_at_once
from optimizer.compress.methods.weights.hessian import aim_at_float, order_inputs
from optimizer.foundation.sections.method_options import SparsegptOptions
from optimizer.foundation.sparsity import Pattern

DEFAULTS = SparsegptOptions()
SOME = 16  # steps of conjugate gradients while the support still changes


@dataclass(frozen=True)
class PrunedMatrix:
    """Result of SparseGPT: values (out, in) float32, 0 where mask (out, in) is False, and the
    damping that was needed."""

    values: Tensor
    mask: Tensor
    damping: float


def sparsegpt(
    W: Tensor,
    H: Tensor,
    pattern: Pattern,
    options: SparsegptOptions = DEFAULTS,
    *,
    P: Tensor | None = None,
    in_place: bool = False,
) -> PrunedMatrix:
    """Prune W (out, in) by SparseGPT; returns values, mask and the damping that was needed.

    H: (in, in), see compress/methods/weights/hessian.py
    P: (in, out), see there
    in_place: H and P may be overwritten, which saves a copy of each

    Raises ValueError for NaN or infinity in any argument, an H that cannot be factored, or an N:M
    that does not divide the inputs.
    """
    inputs = W.shape[1]
    W, H = W.float(), H.float()
    if not all(bool(torch.isfinite(w).all()) for w in W.split(PART)):
        raise ValueError("weight: holds NaN or infinity")
    if not pattern.divides(inputs):
        raise ValueError(f"pattern {pattern}: {pattern.of} does not divide {inputs} inputs")
    if not in_place:
        H, P = H.clone(), None if P is None else P.clone()
    order = order_inputs(H.diagonal(), pattern.unit, options.act_order)
    permute(H, order)
    factor = factorize(H, options.damping)
    T = aim_at_float(W, factor, order, P)
    rows = rows_at_once(W)
    Hinv = factor.invert()
    swept = [_sweep(t, Hinv, pattern) for t in T.split(rows, 1)]
    D = factor.restore()
    back = order.argsort()
    parts = [
        _improve(*one, t.T, D, pattern, options.sweeps)
        for one, t in zip(swept, T.split(rows, 1), strict=True)
    ]
    values, mask = (torch.cat([part[i] for part in parts])[:, back] for i in (0, 1))
    return PrunedMatrix(values, mask, factor.damping)


def _improve(
    values: Tensor,
    mask: Tensor,
    T: Tensor,
    D: Tensor,
    pattern: Pattern,
    sweeps: int,
) -> tuple[Tensor, Tensor]:
    """Improve the pruning mask `sweeps` times and fit values to T on it; returns (values, mask)."""
    values = solve_least_squares(T, D, mask, values, SOME if sweeps else MOST)
    for left in reversed(range(sweeps)):
        if pattern.of:
            values = rechoose_units(values, T, D, pattern, block=BLOCK)
        else:
            values = swap_weights(values, T, D, pattern.zeros(T.shape[1]) // 4)
        mask = values != 0
        values = solve_least_squares(T, D, mask, values, SOME if left else MOST)
    return values, mask


def _sweep(T: Tensor, Hinv: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Prune T (in, out) input after input; returns values and mask (out, in).

    Hinv: (in, in), read on and above the diagonal
    """
    W = T.clone(memory_format=torch.contiguous_format)
    mask = torch.ones_like(W, dtype=torch.bool)
    owed = torch.full((T.shape[1],), pattern.zeros(len(T)), device=T.device)
    block = max(pattern.unit, BLOCK - BLOCK % pattern.unit)
    for start in range(0, len(T), block):
        part = slice(start, min(start + block, len(T)))
        corner = Hinv[part, part]
        if pattern.of:
            Err = _prune_units(W[part], mask[part], corner, pattern)
        else:
            cost = (W[start:] / Hinv.diagonal()[start:, None]).square()
            ranks = cost.argsort(dim=0, stable=True).argsort(dim=0, stable=True)
            mask[part] = (ranks >= owed)[: part.stop - start]
            owed -= (~mask[part]).sum(0)
            Err = _prune_masked(W[part], mask[part], corner)
        W[part.stop :].addmm_(Hinv[part, part.stop :].T, Err, alpha=-1)
    return W.T.contiguous(), mask.T.contiguous()


def _prune_units(W: Tensor, mask: Tensor, Hinv: Tensor, pattern: Pattern) -> Tensor:
    """Choose the pruning mask unit by unit and prune W; both (inputs, out) are overwritten.

    Returns the errors over Hinv_jj (inputs, out).
    """
    Err = torch.empty_like(W)
    for first in range(0, len(W), pattern.of):
        unit = slice(first, first + pattern.of)
        mask[unit] = _cheapest_mask(W[unit], Hinv[unit, unit].triu(), pattern)
        Err[unit] = _prune_masked(W[unit], mask[unit], Hinv[unit, unit])
        W[unit.stop :].addmm_(Hinv[unit, unit.stop :].T, Err[unit], alpha=-1)
    return Err


def _cheapest_mask(W: Tensor, Hinv: Tensor, pattern: Pattern) -> Tensor:
    """Choose the pruning mask (unit, out) whose pruned part costs least. W (unit, out); Hinv (unit,
    unit)."""
    if list_unit_choices(pattern) is None:
        cost = (W / Hinv.diagonal()[:, None]).square()
        return (
            cost.argsort(dim=0, stable=True).argsort(dim=0, stable=True)
            >= pattern.of - pattern.kept
        )
    choices = list(combinations(range(pattern.of), pattern.of - pattern.kept))
    pruned = torch.tensor(choices, device=W.device)
    inverse = Hinv.T @ Hinv
    some = inverse[pruned[:, :, None], pruned[:, None, :]]
    cost = (W[pruned] * torch.linalg.solve(some, W[pruned])).sum(1)
    mask = torch.ones_like(W, dtype=torch.bool)
    mask[pruned[cost.argmin(0)].T, torch.arange(W.shape[1], device=W.device)] = False
    return mask


def _prune_masked(W: Tensor, mask: Tensor, Hinv: Tensor) -> Tensor:
    """Set W (inputs, out) to 0 where mask is False, input after input; returns the errors over
    Hinv_jj. W is overwritten."""
    Err = torch.empty_like(W)
    for i in range(len(W)):
        lost = W[i] * ~mask[i]
        Err[i] = lost / Hinv[i, i]
        W[i] -= lost
        W[i + 1 :].addr_(Hinv[i, i + 1 :], Err[i], alpha=-1)
    return Err
