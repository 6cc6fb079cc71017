"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): round inputs one after another, each time moving
the error made so far onto the inputs that are still to be rounded.

With R upper triangular and H^-1 = R^T R, rounding input j of every output costs
((w_j - q_j) / R_jj)^2 of output error, given that the later inputs then move by the best amounts,
-(w_j - q_j) / R_jj * R_j,later. Inputs with the largest activations go first (act-order), while
the most others can still answer for them. Scales are fixed before, in the order of the inputs, so
no permutation is left in the codes (static groups).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer.compress import hessian as hessians
from optimizer.compress.rtn import searched
from optimizer.qtensor import QTensor, Scheme


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
) -> Rounded:
    """weight (out, in); hessian and cross (in, in) as optimizer.compress.hessian says.

    block: inputs whose corrections are applied together; it changes the speed, not the result.
    Raises ValueError for NaN or infinity in any argument, or a hessian that cannot be inverted.
    """
    weight, hessian = weight.float(), hessian.float()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight: holds NaN or infinity")
    quadratic = hessians.damped(hessian, damping)
    wanted = hessians.target(weight, quadratic, hessian, cross)
    grid = searched(wanted, scheme, quadratic.matrix.diagonal())
    diagonal = quadratic.matrix.diagonal()
    inputs = len(diagonal)
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(inputs)
    codes = _feedback(wanted, inverse_root(quadratic, order), grid, order, block)
    return Rounded(QTensor(codes, grid.scale, grid.zero_point, scheme), quadratic.damping)


def inverse_root(quadratic: hessians.Quadratic, order: Tensor) -> Tensor:
    """R (in, in), upper triangular, with R^T R the inverse of the matrix in the given order.

    Factoring the matrix back to front gives H = U U^T with U upper triangular; R is U^-1.
    """
    back = order.flip(0)
    matrix = quadratic.matrix.double()[back][:, back]
    upper = torch.linalg.cholesky(matrix).flip(0, 1)
    identity = torch.eye(len(order), dtype=torch.float64)
    root: Tensor = torch.linalg.solve_triangular(upper, identity, upper=True)
    return root.float()


def _feedback(wanted: Tensor, root: Tensor, grid: QTensor, order: Tensor, block: int) -> Tensor:
    """Codes (out, in) int8. Works on (in, out), so that one input of all outputs is contiguous."""
    inputs = wanted.shape[1]
    low, high = grid.scheme.low, grid.scheme.high
    scales, zeros = by_input(grid)
    group = (order * scales.shape[0] // inputs).tolist()
    rest = wanted.T[order].contiguous()
    codes = torch.empty_like(rest)
    for start in range(0, inputs, block):
        end = min(start + block, inputs)
        local, corner = rest[start:end], root[start:end, start:end]
        errors = torch.empty_like(local)
        for i in range(end - start):
            scale, zero = scales[group[start + i]], zeros[group[start + i]]
            code = (local[i] / scale).add_(zero).round_().clamp_(low, high)
            codes[start + i] = code
            errors[i] = (local[i] - (code - zero) * scale) / corner[i, i]
            local[i + 1 :].addr_(corner[i, i + 1 :], errors[i], alpha=-1)
        rest[end:].addmm_(root[start:end, end:].T, errors, alpha=-1)
    natural = torch.empty_like(codes)
    natural[order] = codes
    return natural.T.contiguous().to(torch.int8)


def by_input(q: QTensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point as (groups, out) float32, zeros where there is no zero point."""
    out = q.codes.shape[0]
    scale = q.scale.expand(out, -1).T.contiguous()
    if q.zero_point is None:
        return scale, torch.zeros_like(scale)
    return scale, q.zero_point.float().expand(out, -1).T.contiguous()
