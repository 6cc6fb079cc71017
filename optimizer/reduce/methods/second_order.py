"""Choose the inputs of a layer to remove while the other weights compensate (ZipLM, Kurtic et al.
2023, arXiv 2302.04089; the optimal brain surgeon of Hassibi & Stork 1993 for groups of columns).

For a layer y = W x with H = sum of x x^T, removing the columns u and adjusting the others for the
smallest change of the output costs

    tr W_u (H^-1_uu)^-1 W_u^T        and W becomes   W - W_u (H^-1_uu)^-1 H^-1_u:

and H^-1 becomes that of the remaining columns. Units are removed one at a time, in a wide layer
units / STEPS at a time, each time those with the least cost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizer.reduce.methods.least_squares import choose_damping, solve_weights

STEPS = 512  # maximum number of times that costs are computed


def choose(weight: Tensor, hessian: Tensor, cross: Tensor, units: int, keep: int) -> Tensor:
    """Choose the units of a layer to keep while other weights compensate, (keep,), ascending.

    weight: (out, in), whose inputs are `units` groups of adjacent columns
    hessian, cross: (in, in), see least_squares.solve_weights
    """
    every = torch.arange(weight.shape[1])
    W = solve_weights(weight, hessian, cross, every)
    d = choose_damping(hessian, every)
    inverse = torch.linalg.inv(hessian.double() + d * torch.eye(len(every), dtype=torch.float64))
    size = weight.shape[1] // units
    left = torch.ones(units, dtype=torch.bool)
    step = -(-units // STEPS)
    while (excess := int(left.sum()) - keep) > 0:
        cost = _costs(W, inverse, units)
        cost[~left] = torch.inf
        out = cost.topk(min(step, excess), largest=False).indices
        left[out] = False
        columns = (out[:, None] * size + torch.arange(size)).reshape(-1)
        _leave_out(W, inverse, columns)
    return left.nonzero().reshape(-1)


def _costs(W: Tensor, inverse: Tensor, units: int) -> Tensor:
    """Compute the error of the layer's outputs that removing each unit (neuron or head) causes,
    (units,)."""
    size = len(inverse) // units
    if size == 1:
        return W.square().sum(0) / inverse.diagonal()
    places = torch.arange(len(inverse)).reshape(units, size)
    blocks = inverse[places[:, :, None], places[:, None, :]]
    columns = W.reshape(len(W), units, size).permute(1, 2, 0)  # (units, size, out)
    costs: Tensor = (columns * torch.linalg.solve(blocks, columns)).sum((1, 2))
    return costs


def _leave_out(W: Tensor, inverse: Tensor, columns: Tensor) -> None:
    """Remove a unit's columns from W and the inverse Hessian in place. They keep 1 on the diagonal,
    so that later blocks can be solved."""
    rows = inverse[columns]
    part = torch.linalg.solve(rows[:, columns], rows)
    W -= W[:, columns] @ part
    inverse -= rows.T @ part
    inverse[columns], inverse[:, columns], W[:, columns] = 0.0, 0.0, 0.0
    inverse[columns, columns] = 1.0
