"""The quadratic that a rounder minimises, made from sums over the calibration tokens.

For a linear y = x W^T whose float input is x_f and whose input after quantization of everything
before it is x_q, the output error of codes with values Q is, up to a constant,

    |x_f W^T - x_q Q^T|^2 = tr (Q - T) H (Q - T)^T      H = x_q^T x_q      T = W C^T H^-1
                                                        C = x_q^T x_f      (T = W where C is H)

so everything known about the data is one matrix H (in, in) and, to answer also for the error made
by earlier blocks (GPTAQ, arXiv 2504.02692; Qronos, arXiv 2505.11695), one matrix C (in, in).
Only ratios matter: both may be sums or means over tokens, as long as it is the same for both.

In most language models a few tokens, the first of a text above all, have activations hundreds of
times as long as the others' (Sun et al. 2024, "Massive activations", arXiv 2402.17762). Least
squares would fit these few examples to the last detail and nothing else, so that what is right on
the calibration text is wild on another (measured: SmolLM2, down_proj of layer 11). `counted`
limits what one token is worth in both sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = 0.01
LARGEST_DAMPING = 1.0  # beyond it the data would hardly be heard any more


@dataclass(frozen=True)
class Quadratic:
    """A Hessian that inverts. matrix (in, in) float32: H + damping * mean(diagonal of H), with a
    dead input's diagonal set to the mean; lower (in, in) float64: its Cholesky factor; damping:
    as a share of the mean; dead (in,) bool: inputs that were 0 on every token."""

    matrix: Tensor
    lower: Tensor
    damping: float
    dead: Tensor


def counted(rows: Tensor, token_limit: float) -> Tensor:
    """(tokens, 1): what to multiply each of rows (tokens, in) by, so that none is longer than
    token_limit times the median length. At most 1; a row of zeros stays."""
    length = rows.norm(dim=1, keepdim=True)
    limit = token_limit * length.median()
    return torch.where(length > limit, limit / length, torch.ones_like(length))


def damped(hessian: Tensor, damping: float = DAMPING) -> Quadratic:
    """Add the least damping that lets H be factored: `damping`, or that times 10, 100, ...

    hessian (in, in), symmetric and not negative. Raises ValueError when it holds NaN or infinity,
    is zero, or cannot be factored with damping up to 1.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise ValueError("hessian: holds NaN or infinity")
    matrix = hessian.double()
    diagonal = matrix.diagonal()
    dead = diagonal <= 0
    if bool(dead.all()):
        raise ValueError("hessian: zero; this module saw no input")
    mean = float(diagonal[~dead].mean())
    matrix = matrix.masked_fill(dead[:, None] | dead[None, :], 0.0)
    matrix.diagonal()[dead] = mean
    share = damping
    while True:
        trial = matrix + share * mean * torch.eye(len(matrix), dtype=torch.float64)
        lower, failed = torch.linalg.cholesky_ex(trial)
        if not int(failed) and bool(torch.isfinite(lower).all()):
            return Quadratic(trial.float(), lower, share, dead)
        share = max(share * 10, 1e-6)
        if share > LARGEST_DAMPING:
            raise ValueError(f"hessian: not positive even with damping {share / 10:g}")


def target(weight: Tensor, quadratic: Quadratic, hessian: Tensor, cross: Tensor | None) -> Tensor:
    """T (out, in): the float weight that codes should come close to in the metric of H.

    weight (out, in); cross (in, in) = x_q^T x_f or None, when the inputs are the float ones. What
    damping adds pulls towards the weight itself; dead inputs keep it. Raises ValueError for a
    cross that holds NaN or infinity.
    """
    if cross is None:
        return weight
    if not bool(torch.isfinite(cross).all()):
        raise ValueError("cross: holds NaN or infinity")
    shift = (cross - hessian).double()
    return weight + torch.cholesky_solve(shift @ weight.double().T, quadratic.lower).T.float()


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """tr D H D^T for the difference D (out, in) of two weights: the squared error of the outputs
    over the tokens that H (in, in) sums up."""
    return float(((difference @ hessian) * difference).double().sum())
