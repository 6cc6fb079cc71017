"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): quantize the inputs of a weight one after another
and move each error onto the inputs that are not quantized yet.

With Hinv upper triangular and H^-1 = Hinv^T Hinv, quantizing input j of every output costs
((w_j - q_j) / Hinv_jj)^2 of output error, if the later inputs then change by the best amounts,
-(w_j - q_j) / Hinv_jj * Hinv_j,later. Each group's scale is searched by that cost when its first
input is reached, on the values that the group has by then.

act_order quantizes inputs with large activations first, while most others can still make up for
their errors: groups of neighbours by their mean, inputs within a group by their own. A scale so
stays with neighbours in the stored order, and no permutation is stored. Coordinate descent
(refine.py) follows, in the same order.

With a mask (out, in), weights where it is False stay 0, stored as the zero point. The target is
then the best float values on that support (compress/methods/pruning/support.py): for integers on
it, the error from there differs by a constant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optimizer.compress.methods.pruning.support import solve_least_squares
from optimizer.compress.methods.weights.factorization import PART, factorize, permute
from optimizer.compress.methods.weights.hessian import aim_at_float, order_inputs
from optimizer.compress.methods.weights.refine import DescentBounds, refine
from optimizer.compress.methods.weights.rtn import search_scales
from optimizer.foundation.qtensor import QTensor, Scheme, absmax_scale, stack, to_scale_grid
from optimizer.foundation.sections.method_options import GptqOptions

DEFAULTS = GptqOptions()
VALUES = 1 << 22  # values of a weight that a processor quantizes together
BLOCK = 128  # inputs whose errors are moved together; it changes the speed, not the result
SWEEPS = 2  # of refine.py; 0 is GPTQ as published


@dataclass(frozen=True)
class RoundedMatrix:
    """Result of GPTQ: the integers, and the damping that was needed, as a share of the mean of H's
    diagonal."""

    q: QTensor
    damping: float


def gptq(
    W: Tensor,
    H: Tensor,
    scheme: Scheme,
    options: GptqOptions = DEFAULTS,
    *,
    P: Tensor | None = None,
    in_place: bool = False,
) -> RoundedMatrix:
    """Quantize W (out, in) by GPTQ; returns the integers, and the damping that was needed.

    H: (in, in), see hessian.py
    P: (in, out), see hessian.py, where the target is the float model's output
    in_place: H and P may be overwritten, which saves a copy of each

    Raises ValueError for NaN or infinity in any argument, an H that cannot be factored, or a group
    that does not divide the inputs.
    """
    H = H.float()
    if not in_place:
        H, P = H.clone(), None if P is None else P.clone()
    return _quantize(W, H, scheme, options, P, None)


def gptq_on_support(
    W: Tensor,
    H: Tensor,
    scheme: Scheme,
    mask: Tensor,
    options: GptqOptions = DEFAULTS,
    P: Tensor | None = None,
) -> RoundedMatrix:
    """Quantize W (out, in) by gptq, with weights fixed at 0 where `mask` (out, in) is False.

    H (in, in) and P (in, out) are overwritten. Raises ValueError as gptq.
    """
    return _quantize(W, H.float(), scheme, options, P, mask)


def _quantize(
    W: Tensor,
    H: Tensor,
    scheme: Scheme,
    options: GptqOptions,
    P: Tensor | None,
    mask: Tensor | None,
) -> RoundedMatrix:
    """Quantize W (out, in) by GPTQ, with weights fixed at 0 where `mask` is False; None: no
    mask."""
    out, inputs = W.shape
    W = W.float()
    if not all(bool(torch.isfinite(w).all()) for w in W.split(PART)):
        raise ValueError("weight: holds NaN or infinity")
    size = inputs // scheme.groups(inputs)
    order = order_inputs(H.diagonal(), size, options.act_order)
    permute(H, order)
    factor = factorize(H, options.damping)
    T = aim_at_float(W, factor, order, P)
    if mask is not None:
        W, mask = W * mask, mask[:, order]
        D = replace(factor, matrix=factor.matrix.clone()).restore()
        T = solve_least_squares(T.T, D, mask, T.T).T
        del D
    group_order = order[::size] // size
    rows = out if scheme.granularity == "tensor" else rows_at_once(W)
    Hinv, first, bounds = factor.invert(), [], []
    masks = [None] * out if mask is None else mask.split(rows)
    for w, t, m in zip(W.split(rows), T.split(rows, 1), masks, strict=False):
        cover = absmax_scale(w, scheme)[0].abs()[:, group_order]
        least, most = cover / options.max_scale_ratio, cover * options.max_scale_ratio
        limits = to_scale_grid(least), to_scale_grid(most)
        bounds.append(DescentBounds(limits, m))
        first.append(_feed_errors_back(t, Hinv, scheme, bounds[-1]))
    D = factor.restore()
    parts = []
    for t, bound in zip(T.split(rows, 1), bounds, strict=True):
        q = first.pop(0)
        parts.append(refine(q, t.T, D, bound, sweeps=SWEEPS, block=BLOCK))
    return RoundedMatrix(_in_stored_order(stack(parts, out), order, group_order), factor.damping)


def rows_at_once(W: Tensor) -> int:
    """Return the number of rows of W (out, in), which are independent of each other, that GPTQ
    quantizes together: those that fit into a processor's cache; on a GPU all, because each
    operation is a launch there.
    """
    return max(1, VALUES // W.shape[1]) if W.device.type == "cpu" else len(W)


def _feed_errors_back(T: Tensor, Hinv: Tensor, scheme: Scheme, bounds: DescentBounds) -> QTensor:
    """Quantize T (in, out) by GPTQ input after input, each group's scale within bounds.scale (out,
    groups).

    Hinv: (in, in), read on and above the diagonal
    """
    inputs = len(T)
    groups = scheme.groups(inputs)
    size = inputs // groups
    one = replace(scheme, granularity="channel", group_size=None) if groups > 1 else scheme
    W = T.clone(memory_format=torch.contiguous_format)
    Q = torch.empty_like(W, dtype=torch.int8)
    grids: list[QTensor] = []
    costs = Hinv.diagonal() ** -2
    mask = None if bounds.mask is None else bounds.mask.T
    assert bounds.scale is not None
    for group, first in enumerate(range(0, inputs, size)):
        end = first + size
        values = W[first:end] if mask is None else W[first:end] * mask[first:end]
        grid = search_scales(values.T.contiguous(), one, costs[first:end])
        low, high = (limit[:, group : group + 1] for limit in bounds.scale)
        scale = torch.copysign(grid.scale.abs().clamp(low, high), grid.scale)
        grids.append(replace(grid, scale=scale))
        for start in range(first, end, BLOCK):
            part = slice(start, min(start + BLOCK, end))
            kept = None if mask is None else mask[part]
            Q[part], Err = _quantize_block(W[part], Hinv[part, part], grids[-1], kept)
            W[part.stop :].addmm_(Hinv[part, part.stop :].T, Err, alpha=-1)
    scale = torch.cat([g.scale for g in grids], 1)
    zeros = [g.zero_point for g in grids if g.zero_point is not None]
    return QTensor(Q.T.contiguous(), scale, torch.cat(zeros, 1) if zeros else None, scheme)


def _quantize_block(
    W: Tensor, Hinv: Tensor, grid: QTensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute GPTQ's integers and errors over Hinv_jj of one block's inputs; W (inputs, out) is
    overwritten."""
    out, scheme = W.shape[1], grid.scheme
    scale = grid.scale[:, 0].expand(out).contiguous()
    zero = W.new_zeros(1) if grid.zero_point is None else grid.zero_point[:, 0].float()
    Q, Err = torch.empty_like(W), torch.empty_like(W)
    for i in range(len(W)):
        Q[i] = (W[i] / scale).add_(zero).round_().clamp_(scheme.low, scheme.high)
        if mask is not None:
            Q[i] = torch.where(mask[i], Q[i], zero)
        Err[i] = (W[i] - (Q[i] - zero) * scale) / Hinv[i, i]
        W[i + 1 :].addr_(Hinv[i, i + 1 :], Err[i], alpha=-1)
    return Q, Err


def _in_stored_order(q: QTensor, order: Tensor, group_order: Tensor) -> QTensor:
    """Put the inputs and groups of q back from the order in which GPTQ quantized them into the
    weight's own order."""
    back, groups = order.argsort(), group_order.argsort()
    zero = None if q.zero_point is None else q.zero_point[:, groups]
    return QTensor(q.integers[:, back], q.scale[:, groups], zero, q.scheme)
