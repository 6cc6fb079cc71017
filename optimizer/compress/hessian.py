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

The first token of a text is one of hundreds, and in most models the one that half of all attention
rests on (Xiao et al. 2024, "attention sinks", arXiv 2309.17453); what enters a module for it often
lies along a direction of its own. Error feedback moves the others' errors there, where a mean over
tokens does not see them: measured on SmolLM2 in W8A8, its key in layer 12 was off by 1.3 times its
length, and attention to it fell from 0.36 to 0.02. `leading` makes it count for more (as in RSQ,
Sung et al. 2025, arXiv 2503.01820).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = 0.01
LARGEST_DAMPING = 1.0  # beyond it the data would hardly be heard any more
PART = 512  # rows or columns that exist a second time in float64


@dataclass(frozen=True)
class Factor:
    """A Hessian that inverts, its inputs taking turns. order (in,): the turns; lower (in, in)
    float64: the Cholesky factor of `damped`, last turn first; damping: as a share of the mean."""

    order: Tensor
    lower: Tensor
    damping: float


def counted(rows: Tensor, token_limit: float) -> Tensor:
    """(tokens, 1): what to multiply each of rows (tokens, in) by, so that none is longer than
    token_limit times the median length. At most 1; a row of zeros stays."""
    length = rows.norm(dim=1, keepdim=True)
    limit = token_limit * length.median()
    return torch.where(length > limit, limit / length, torch.ones_like(length))


def leading(real: Tensor, share: float) -> Tensor:
    """(tokens, 1): what to multiply each real token's row by, so that the first token of each text
    stands for `share` of its tokens, in squares; at least 1. real (texts, sequence) bool; the rows
    of the tokens that are real come text by text."""
    tokens = real.sum(1)
    weight = (share / (1 - share) * (tokens - 1)).clamp(min=1).sqrt()
    made = torch.ones(int(tokens.sum()), 1)
    some = tokens > 0
    made[(tokens.cumsum(0) - tokens)[some]] = weight[some, None]
    return made


def factored(hessian: Tensor, order: Tensor, damping: float = DAMPING) -> Factor:
    """Factor H with the least damping that lets it: `damping`, or that times 10, 100, ...

    hessian (in, in), symmetric and not negative. Holds nothing else of its size, which is why the
    factor overwrites what it is of. Raises ValueError when it holds NaN or infinity, is zero, or
    cannot be factored with damping up to 1.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise ValueError("hessian: holds NaN or infinity")
    if not bool((hessian.diagonal() > 0).any()):
        raise ValueError("hessian: zero; this module saw no input")
    back, share = order.flip(0), damping
    work = torch.empty(hessian.shape, dtype=torch.float64).mT  # as LAPACK stores it: in place
    failed = torch.empty((), dtype=torch.int32)
    while True:
        for some, rows in zip(back.split(PART), work.mT.split(PART), strict=True):
            rows.copy_(hessian[some][:, back])
        _damp(work, share)
        torch.linalg.cholesky_ex(work, out=(work, failed))
        if not int(failed) and bool(torch.isfinite(work.diagonal()).all()):
            return Factor(order, work, share)
        share = max(share * 10, 1e-6)
        if share > LARGEST_DAMPING:
            raise ValueError(f"hessian: not positive even with damping {share / 10:g}")


def damped(hessian: Tensor, damping: float) -> Tensor:
    """(in, in): H + damping * mean(diagonal of H), with the diagonal of an input that was 0 on
    every token set to the mean."""
    return _damp(hessian.clone(), damping)


def _damp(matrix: Tensor, damping: float) -> Tensor:
    diagonal = matrix.diagonal()
    dead = diagonal <= 0
    mean = float(diagonal[~dead].double().mean())
    if bool(dead.any()):
        matrix[dead] = 0.0
        matrix[:, dead] = 0.0
    diagonal[dead] = mean
    diagonal += damping * mean
    return matrix


def target(weight: Tensor, factor: Factor, hessian: Tensor, cross: Tensor | None) -> Tensor:
    """T (out, in): the float weight that codes should come close to in the metric of H.

    weight (out, in); cross (in, in) = x_q^T x_f or None, when the inputs are the float ones. What
    damping adds pulls towards the weight itself; dead inputs keep it. Raises ValueError for a
    cross that holds NaN or infinity.
    """
    if cross is None:
        return weight
    if not bool(torch.isfinite(cross).all()):
        raise ValueError("cross: holds NaN or infinity")
    back = factor.order.flip(0)
    return torch.cat([_target(w, factor, back, hessian, cross) for w in weight.split(PART)])


def _target(weight: Tensor, factor: Factor, back: Tensor, hessian: Tensor, cross: Tensor) -> Tensor:
    across = weight.double().T
    pairs = zip(cross.split(PART), hessian.split(PART), strict=True)
    pull = torch.cat([(c.double() - h.double()) @ across for c, h in pairs])[back]
    half = torch.linalg.solve_triangular(factor.lower, pull, upper=False)
    moved = torch.empty_like(weight)
    moved[:, back] = torch.linalg.solve_triangular(factor.lower.mT, half, upper=True).T.float()
    return weight + moved


def inverse_root(factor: Factor) -> Tensor:
    """R (in, in) float32, upper triangular, with R^T R the inverse of the matrix in its order.
    factor is used up: its own inverse overwrites it.

    Factoring it last turn first, P H P = L L^T, gives H = U U^T with U = P L P upper triangular;
    R is U^-1 = P L^-1 P.
    """
    lower, size = factor.lower, len(factor.order)
    root = torch.empty(size, size)
    for start in range(0, size, PART):
        rows = slice(start, min(start + PART, size))
        corner = lower[rows, rows]
        one = torch.eye(len(corner), dtype=torch.float64)
        corner = torch.linalg.solve_triangular(corner, one, upper=False)
        lower[rows, :start] = -corner @ (lower[rows, :start] @ lower[:start, :start])
        lower[rows, rows] = corner
        root[size - rows.stop : size - start] = lower[rows].flip(0, 1)
    return root


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """tr D H D^T for the difference D (out, in) of two weights: the squared error of the outputs
    over the tokens that H (in, in) sums up."""
    return float(((difference @ hessian) * difference).double().sum())
