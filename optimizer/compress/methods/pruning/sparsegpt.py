"""SparseGPT (Frantar and Alistarh 2023, arXiv 2301.00774): prune inputs one after another, each
time moving the error made onto the inputs that are still to come.

As in compress/methods/weights/gptq.py, H^-1 = R^T R with R upper triangular, and giving up w_j at
its turn costs (w_j / R_jj)^2. The mask is chosen inside the sweep, on the values that the weights
have by then:

    N:M           when a unit's turn comes, of every choice S to prune the one with the least cost
                  w_S ((R_uu^T R_uu)_SS)^-1 w_S, which is that of giving all of S up at once
    unstructured  at every block of inputs, per output: of all inputs that are left, the cheapest
                  that are still owed; those of them in the block are pruned (the paper takes an
                  equal share of each block instead)

What is left then gets the best values on its support, and the support itself is improved while the
error falls (support.py). A target T other than W (compress/methods/weights/hessian.py: earlier
blocks' errors) is aimed at as gptq does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from optimizer.compress.methods.pruning.support import (
    MOST,
    choices,
    least_squares,
    rechosen,
    swapped,
)
from optimizer.compress.methods.weights import hessian as hessians
from optimizer.foundation.sparsity import Pattern

SOME = 16  # steps of conjugate gradients before the support changes
VALUES = 1 << 22  # of a weight at a time: outputs do not see each other


@dataclass(frozen=True)
class SparsegptOptions:
    """act_order: large activations first, in units of M. damping: as of gptq. block: inputs whose
    corrections are applied together. sweeps: rounds of improving the support; 0 is the paper's
    mask with the best values on it."""

    act_order: bool = True
    damping: float = hessians.DAMPING
    block: int = 128
    sweeps: int = 2


@dataclass(frozen=True)
class Pruned:
    """values (out, in) float32, 0 where mask (out, in) is False; the damping that was needed."""

    values: Tensor
    mask: Tensor
    damping: float


def sparsegpt(
    W: Tensor,
    H: Tensor,
    pattern: Pattern,
    options: SparsegptOptions = SparsegptOptions(),
    *,
    P: Tensor | None = None,
    in_place: bool = False,
) -> Pruned:
    """W (out, in); H (in, in) and P (in, out) as compress/methods/weights/hessian.py says.
    in_place: H and P are not needed any more, and their memory is used.

    Raises ValueError for NaN or infinity in any argument, an H that cannot be inverted, or an N:M
    that does not divide the inputs.
    """
    inputs = W.shape[1]
    W, H = W.float(), H.float()
    if not all(bool(torch.isfinite(w).all()) for w in W.split(hessians.PART)):
        raise ValueError("weight: holds NaN or infinity")
    if not pattern.divides(inputs):
        raise ValueError(f"pattern {pattern}: {pattern.of} does not divide {inputs} inputs")
    if not in_place:
        H, P = H.clone(), None if P is None else P.clone()
    order = hessians.turns(H.diagonal(), pattern.unit, options.act_order)
    factor = hessians.factored(H, order, options.damping)
    T = hessians.target(W, factor, order, P)
    rows = max(1, VALUES // inputs)
    R = hessians.inverted(factor)
    swept = [_sweep(t, R, pattern, options.block) for t in T.split(rows, 1)]
    D = hessians.whole(factor)
    back = order.argsort()
    parts = [
        _improved(*one, t.T, D, pattern, options)
        for one, t in zip(swept, T.split(rows, 1), strict=True)
    ]
    values, mask = (torch.cat([part[i] for part in parts])[:, back] for i in (0, 1))
    return Pruned(values, mask, factor.damping)


def _improved(
    values: Tensor,
    mask: Tensor,
    T: Tensor,
    D: Tensor,
    pattern: Pattern,
    options: SparsegptOptions,
) -> tuple[Tensor, Tensor]:
    """The best values on the support, which is improved first. All (out, in), in turns."""
    values = least_squares(T, D, mask, values, SOME if options.sweeps else MOST)
    for left in reversed(range(options.sweeps)):
        if pattern.of:
            values = rechosen(values, T, D, pattern, block=options.block)
        else:
            values = swapped(values, T, D, pattern.zeros(T.shape[1]) // 4)
        mask = values != 0
        values = least_squares(T, D, mask, values, SOME if left else MOST)
    return values, mask


def _sweep(T: Tensor, R: Tensor, pattern: Pattern, block: int) -> tuple[Tensor, Tensor]:
    """Values and mask (out, in) of T (in, out). R (in, in): right above the diagonal."""
    rest = T.clone(memory_format=torch.contiguous_format)
    mask = torch.ones_like(rest, dtype=torch.bool)
    owed = torch.full((T.shape[1],), pattern.zeros(len(T)))
    block = max(pattern.unit, block - block % pattern.unit)
    for start in range(0, len(T), block):
        part = slice(start, min(start + block, len(T)))
        corner = R[part, part]
        if pattern.of:
            errors = _by_units(rest[part], mask[part], corner, pattern)
        else:
            cost = (rest[start:] / R.diagonal()[start:, None]).square()
            ranks = cost.argsort(dim=0, stable=True).argsort(dim=0, stable=True)
            mask[part] = (ranks >= owed)[: part.stop - start]
            owed -= (~mask[part]).sum(0)
            errors = _given_up(rest[part], mask[part], corner)
        rest[part.stop :].addmm_(R[part, part.stop :].T, errors, alpha=-1)
    return rest.T.contiguous(), mask.T.contiguous()


def _by_units(local: Tensor, mask: Tensor, corner: Tensor, pattern: Pattern) -> Tensor:
    """Choose unit by unit in local (inputs, out), which changes, as does mask. Errors over R_jj."""
    errors = torch.empty_like(local)
    for first in range(0, len(local), pattern.of):
        unit = slice(first, first + pattern.of)
        mask[unit] = _cheapest(local[unit], corner[unit, unit].triu(), pattern)
        errors[unit] = _given_up(local[unit], mask[unit], corner[unit, unit])
        local[unit.stop :].addmm_(corner[unit, unit.stop :].T, errors[unit], alpha=-1)
    return errors


def _cheapest(w: Tensor, R: Tensor, pattern: Pattern) -> Tensor:
    """The mask (unit, out) whose pruned part costs least. w (unit, out); R (unit, unit)."""
    if choices(pattern) is None:
        cost = (w / R.diagonal()[:, None]).square()
        return (
            cost.argsort(dim=0, stable=True).argsort(dim=0, stable=True)
            >= pattern.of - pattern.kept
        )
    pruned = torch.tensor(list(combinations(range(pattern.of), pattern.of - pattern.kept)))
    inverse = R.T @ R
    some = inverse[pruned[:, :, None], pruned[:, None, :]]
    cost = (w[pruned] * torch.linalg.solve(some, w[pruned])).sum(1)
    mask = torch.ones_like(w, dtype=torch.bool)
    mask[pruned[cost.argmin(0)].T, torch.arange(w.shape[1])] = False
    return mask


def _given_up(local: Tensor, mask: Tensor, corner: Tensor) -> Tensor:
    """Prune local (inputs, out), which changes, where mask is False. Returns the errors over R."""
    errors = torch.empty_like(local)
    for i in range(len(local)):
        lost = local[i] * ~mask[i]
        errors[i] = lost / corner[i, i]
        local[i] -= lost
        local[i + 1 :].addr_(corner[i, i + 1 :], errors[i], alpha=-1)
    return errors
