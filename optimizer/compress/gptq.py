"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): round inputs one after another, each time moving
the error made so far onto the inputs that are still to be rounded.

With R upper triangular and H^-1 = R^T R, rounding input j of every output costs
((w_j - q_j) / R_jj)^2 of output error, given that the later inputs then move by the best amounts,
-(w_j - q_j) / R_jj * R_j,later. That cost is also what a scale is searched by, when its group's
turn comes, on the values the group has by then.

Large activations go first (act-order), while the most others can still answer for them: groups
of neighbours by their mean, inputs within a group by their own. A scale so stays with neighbours
in the stored order, and no permutation reaches the codes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optimizer.compress import hessian as hessians
from optimizer.compress.refine import refined
from optimizer.compress.rtn import searched
from optimizer.qtensor import QTensor, Scheme, absmax_scale, stacked, to_scale_grid

WIDEST = 2.0
ROWS = 1024  # outputs at a time: they do not see each other, and each is held a few times over


@dataclass(frozen=True)
class Rounded:
    """The codes, and the damping that was needed, as a share of the mean of H's diagonal."""

    q: QTensor
    damping: float


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    *,
    cross: Tensor | None = None,
    act_order: bool = True,
    damping: float = hessians.DAMPING,
    block: int = 128,
    sweeps: int = 2,
    widest: float = WIDEST,
) -> Rounded:
    """weight (out, in); hessian and cross (in, in) as optimizer.compress.hessian says.

    block: inputs whose corrections are applied together; it changes the speed, not the result.
    sweeps: of optimizer.compress.refine afterwards; 0 is GPTQ as published. widest: no scale is
    more than so many times what just covers the group's own weights, or less than that part of it,
    whatever earlier errors and the target would move into the group; what then lies beyond the
    codes is made up for by later inputs and by the sweeps. Raises ValueError for
    NaN or infinity in any argument, a hessian that cannot be inverted, or a group that does not
    divide the inputs.
    """
    weight, hessian = weight.float(), hessian.float()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight: holds NaN or infinity")
    size = weight.shape[1] // scheme.groups(weight.shape[1])
    order = _order(hessian.diagonal(), size, act_order)
    factor = hessians.factored(hessian, order, damping)
    damping = factor.damping
    rows = weight.split(ROWS if scheme.granularity != "tensor" else len(weight))
    wanted = [hessians.target(w, factor, hessian, cross) for w in rows]
    root = hessians.inverse_root(factor)
    del factor
    matrix = hessians.damped(hessian, damping)
    made = []
    for near, aim in zip(rows, wanted, strict=True):
        cover, _ = absmax_scale(near, scheme)
        limits = to_scale_grid(cover / widest), to_scale_grid(cover * widest)
        first = _feedback(aim, root, order, scheme, limits, block)
        made.append(refined(first, aim, matrix, limits, sweeps=sweeps, block=block))
    return Rounded(stacked(made), damping)


def _order(diagonal: Tensor, size: int, act_order: bool) -> Tensor:
    """The inputs in the order of their turns; those of one group of `size` follow each other."""
    index = torch.arange(len(diagonal)).reshape(-1, size)
    if not act_order:
        return index.reshape(-1)
    groups = diagonal.reshape(-1, size)
    within = groups.argsort(dim=1, descending=True, stable=True)
    turns = groups.mean(1).argsort(descending=True, stable=True)
    return index.gather(1, within)[turns].reshape(-1)


def _feedback(
    wanted: Tensor,
    root: Tensor,
    order: Tensor,
    scheme: Scheme,
    limits: tuple[Tensor, Tensor],
    block: int,
) -> QTensor:
    """Round `wanted` (out, in) in the given order, choosing each group's scale at its turn, between
    limits (out, groups).

    Works on (in, out), so that one input of all outputs is contiguous.
    """
    inputs = len(order)
    size = inputs // scheme.groups(inputs)
    one = replace(scheme, granularity="channel", group_size=None) if inputs > size else scheme
    rest = wanted.T[order].contiguous()
    codes = torch.empty_like(rest)
    grids: dict[int, QTensor] = {}
    costs = root.diagonal() ** -2
    for first in range(0, inputs, size):
        end = first + size
        group = int(order[first]) // size
        grid = searched(rest[first:end].T.contiguous(), one, costs[first:end])
        low, high = (limit[:, group : group + 1] for limit in limits)
        scale = grid.scale.clamp(low, high)
        grid = grids[group] = replace(grid, scale=scale)
        for start in range(first, end, block):
            stop = min(start + block, end)
            corner = root[start:stop, start:stop]
            codes[start:stop], errors = _block(rest[start:stop], corner, grid)
            rest[stop:].addmm_(root[start:stop, stop:].T, errors, alpha=-1)
    stored = torch.empty_like(codes)
    stored[order] = codes
    found = [grids[g] for g in range(len(grids))]
    scale = torch.cat([g.scale for g in found], 1)
    zeros = [g.zero_point for g in found if g.zero_point is not None]
    zero_point = torch.cat(zeros, 1) if zeros else None
    return QTensor(stored.T.contiguous().to(torch.int8), scale, zero_point, scheme)


def _block(local: Tensor, corner: Tensor, grid: QTensor) -> tuple[Tensor, Tensor]:
    """Codes of the inputs in local (inputs, out), which it changes, and errors over R_jj."""
    out, scheme = local.shape[1], grid.scheme
    scale = grid.scale[:, 0].expand(out).contiguous()
    zero = torch.zeros(1) if grid.zero_point is None else grid.zero_point[:, 0].float()
    codes, errors = torch.empty_like(local), torch.empty_like(local)
    for i in range(len(local)):
        codes[i] = (local[i] / scale).add_(zero).round_().clamp_(scheme.low, scheme.high)
        errors[i] = (local[i] - (codes[i] - zero) * scale) / corner[i, i]
        local[i + 1 :].addr_(corner[i, i + 1 :], errors[i], alpha=-1)
    return codes, errors
