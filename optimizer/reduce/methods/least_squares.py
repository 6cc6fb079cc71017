"""Adjust the weights of a layer that lost inputs, by least squares to its old output."""

from __future__ import annotations

import torch
from torch import Tensor

DAMPING = 0.01  # share of the mean second moment, as quantize.gptq.damping


def solve_weights(weight: Tensor, hessian: Tensor, cross: Tensor, kept: Tensor) -> Tensor:
    """Adjust a layer that lost inputs: compute the weights V (out, kept), float64, that minimise |V
    x_k - W f|^2 over tokens, with damping towards W:

        V = (W C_k + d W_k) (H_kk + d)^-1       d = DAMPING * mean diagonal of H_kk

    Raises ValueError for sums that are NaN, infinite or zero.

    weight: W (out, in)
    hessian: H (in, in), sum of x x^T over the inputs x of the smaller model
    cross: C (in, in), sum of f x^T, where f are the inputs in the float model
    kept: kept columns (k,)
    """
    W, H, C = weight.double(), hessian.double(), cross.double()
    if not bool(torch.isfinite(H).all() and torch.isfinite(C).all()):
        raise ValueError("the sums over tokens are NaN or infinite")
    d = choose_damping(H, kept)
    A = H[kept][:, kept] + d * torch.eye(len(kept), dtype=torch.float64)
    B = W @ C[:, kept] + d * W[:, kept]
    V: Tensor = torch.linalg.solve(A, B.T).T
    return V


def solve_factors(weight: Tensor, hessian: Tensor, cross: Tensor, kept: Tensor) -> Tensor:
    """Adjust a layer that lost inputs: compute weights (out, kept), float64, that are the kept
    columns scaled by factors m. The factors minimise the error of `solve_weights` (mask tuning of
    Kwon et al. 2022, section 4.3):

        (W_k^T W_k * H_kk + d) m = (W_k^T W * C_k^T) 1 + d        * between matrices: elementwise

    Arguments are those of `solve_weights`.
    """
    W, H, C = weight.double(), hessian.double(), cross.double()
    gram = W.T @ W
    A = gram[kept][:, kept] * H[kept][:, kept]
    d = DAMPING * A.diagonal().mean()
    b = (gram[kept] * C[:, kept].T).sum(1)
    eye = torch.eye(len(kept), dtype=torch.float64)
    tuned_columns: Tensor = W[:, kept] * torch.linalg.solve(A + d * eye, b + d)
    return tuned_columns


def choose_damping(hessian: Tensor, kept: Tensor) -> float:
    """Return the damping d of `solve_weights`. Raises ValueError where every kept input was always
    0."""
    mean = float(hessian.diagonal()[kept].double().mean())
    if not mean > 0:
        raise ValueError("the sums over tokens are zero: this layer had no input")
    return DAMPING * mean
