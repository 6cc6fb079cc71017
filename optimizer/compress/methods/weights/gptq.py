"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): round inputs one after another, each time moving
the error made so far onto the inputs that are still to be rounded.

With R upper triangular and H^-1 = R^T R, rounding input j of every output costs
((w_j - q_j) / R_jj)^2 of output error, given that the later inputs then move by the best amounts,
-(w_j - q_j) / R_jj * R_j,later. That cost is also what a scale is searched by, when its group's
turn comes, on the values the group has by then.

Large activations go first (act-order), while the most others can still answer for them: groups
of neighbours by their mean, inputs within a group by their own. A scale so stays with neighbours
in the stored order, and no permutation reaches the codes. The descent that follows (refine.py)
visits groups and inputs in the same order.

With a mask (out, in) what is False there stays 0, whose integer is the zero point. The target is
then the best float values on that support (compress/methods/pruning/support.py): for integers on
it, the error is that from there but for a constant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optimizer.compress.methods.pruning.support import least_squares
from optimizer.compress.methods.weights import hessian as hessians
from optimizer.compress.methods.weights.refine import Bounds, refined
from optimizer.compress.methods.weights.rtn import searched
from optimizer.foundation.qtensor import QTensor, Scheme, absmax_scale, stacked, to_scale_grid

VALUES = 1 << 22  # of a weight at a time: outputs do not see each other, and are held often


@dataclass(frozen=True)
class GptqOptions:
    """act_order: large activations first. damping: share of the mean of H's diagonal that is added
    to it. max_scale_ratio: no scale is more than so many times what just covers the group's own
    weights, or less than that part of it, whatever earlier errors and the target would move into
    the group; what then lies beyond the codes is made up for by later inputs and by the sweeps.
    block: inputs whose corrections are applied together; it changes the speed, not the result.
    sweeps: of refine.py afterwards; 0 is GPTQ as published."""

    act_order: bool = True
    damping: float = hessians.DAMPING
    max_scale_ratio: float = 2.0
    block: int = 128
    sweeps: int = 2


@dataclass(frozen=True)
class Rounded:
    """The codes, and the damping that was needed, as a share of the mean of H's diagonal."""

    q: QTensor
    damping: float


def gptq(
    W: Tensor,
    H: Tensor,
    scheme: Scheme,
    options: GptqOptions = GptqOptions(),
    *,
    P: Tensor | None = None,
    in_place: bool = False,
) -> Rounded:
    """W (out, in): the weight; H (in, in) and P (in, out) as hessian.py says, P where the target is
    the float model's output. in_place: H and P are not needed any more, and their memory is used.

    Raises ValueError for NaN or infinity in any argument, an H that cannot be inverted, or a group
    that does not divide the inputs.
    """
    H = H.float()
    if not in_place:
        H, P = H.clone(), None if P is None else P.clone()
    return _rounded(W, H, scheme, options, P, None)


def gptq_on_support(
    W: Tensor,
    H: Tensor,
    scheme: Scheme,
    mask: Tensor,
    options: GptqOptions = GptqOptions(),
    P: Tensor | None = None,
) -> Rounded:
    """As gptq, with a mask (out, in), False where a weight is pruned. The memory of H and P is
    used."""
    return _rounded(W, H.float(), scheme, options, P, mask)


def _rounded(
    W: Tensor,
    H: Tensor,
    scheme: Scheme,
    options: GptqOptions,
    P: Tensor | None,
    mask: Tensor | None,
) -> Rounded:
    out, inputs = W.shape
    W = W.float()
    if not all(bool(torch.isfinite(w).all()) for w in W.split(hessians.PART)):
        raise ValueError("weight: holds NaN or infinity")
    size = inputs // scheme.groups(inputs)
    order = hessians.turns(H.diagonal(), size, options.act_order)
    factor = hessians.factored(H, order, options.damping)
    T = hessians.target(W, factor, order, P)
    if mask is not None:
        W, mask = W * mask, mask[:, order]
        D = hessians.whole(replace(factor, matrix=factor.matrix.clone()))
        T = least_squares(T.T, D, mask, T.T).T
        del D
    group_order = order[::size] // size
    rows = out if scheme.granularity == "tensor" else max(1, VALUES // inputs)
    R, first, bounds = hessians.inverted(factor), [], []
    masks = [None] * out if mask is None else mask.split(rows)
    for w, t, m in zip(W.split(rows), T.split(rows, 1), masks, strict=False):
        cover, ratio = absmax_scale(w, scheme)[0].abs()[:, group_order], options.max_scale_ratio
        limits = to_scale_grid(cover / ratio), to_scale_grid(cover * ratio)
        bounds.append(Bounds(limits, m))
        first.append(_feedback(t, R, scheme, bounds[-1], options.block))
    D = hessians.whole(factor)
    parts = []
    for t, bound in zip(T.split(rows, 1), bounds, strict=True):
        q = first.pop(0)
        parts.append(refined(q, t.T, D, bound, sweeps=options.sweeps, block=options.block))
    return Rounded(_stored(stacked(parts), order, group_order), factor.damping)


def _feedback(T: Tensor, R: Tensor, scheme: Scheme, bounds: Bounds, block: int) -> QTensor:
    """Round T (in, out), input after input, choosing each group's scale at its turn, between
    bounds.scale (out, groups). R (in, in): right above the diagonal, anything below."""
    inputs = len(T)
    groups = scheme.groups(inputs)
    size = inputs // groups
    one = replace(scheme, granularity="channel", group_size=None) if groups > 1 else scheme
    rest = T.clone(memory_format=torch.contiguous_format)
    codes = torch.empty_like(rest, dtype=torch.int8)
    grids: list[QTensor] = []
    costs = R.diagonal() ** -2
    mask = None if bounds.mask is None else bounds.mask.T
    assert bounds.scale is not None
    for group, first in enumerate(range(0, inputs, size)):
        end = first + size
        own = rest[first:end] if mask is None else rest[first:end] * mask[first:end]
        grid = searched(own.T.contiguous(), one, costs[first:end])
        low, high = (limit[:, group : group + 1] for limit in bounds.scale)
        scale = torch.copysign(grid.scale.abs().clamp(low, high), grid.scale)
        grids.append(replace(grid, scale=scale))
        for start in range(first, end, block):
            part = slice(start, min(start + block, end))
            kept = None if mask is None else mask[part]
            codes[part], errors = _block(rest[part], R[part, part], grids[-1], kept)
            rest[part.stop :].addmm_(R[part, part.stop :].T, errors, alpha=-1)
    scale = torch.cat([g.scale for g in grids], 1)
    zeros = [g.zero_point for g in grids if g.zero_point is not None]
    return QTensor(codes.T.contiguous(), scale, torch.cat(zeros, 1) if zeros else None, scheme)


def _stored(q: QTensor, order: Tensor, group_order: Tensor) -> QTensor:
    """q, whose inputs and groups are in the order of their turns, as it is stored."""
    back, groups = order.argsort(), group_order.argsort()
    zero = None if q.zero_point is None else q.zero_point[:, groups]
    return QTensor(q.integers[:, back], q.scale[:, groups], zero, q.scheme)


def _block(
    local: Tensor, corner: Tensor, grid: QTensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes of the inputs in local (inputs, out), which it changes, and errors over R_jj."""
    out, scheme = local.shape[1], grid.scheme
    scale = grid.scale[:, 0].expand(out).contiguous()
    zero = torch.zeros(1) if grid.zero_point is None else grid.zero_point[:, 0].float()
    codes, errors = torch.empty_like(local), torch.empty_like(local)
    for i in range(len(local)):
        codes[i] = (local[i] / scale).add_(zero).round_().clamp_(scheme.low, scheme.high)
        if mask is not None:
            codes[i] = torch.where(mask[i], codes[i], zero)
        errors[i] = (local[i] - (codes[i] - zero) * scale) / corner[i, i]
        local[i + 1 :].addr_(corner[i, i + 1 :], errors[i], alpha=-1)
    return codes, errors
