"""The quadratic that a rounding method minimises, made from sums over the calibration tokens.

For a linear y = x W^T whose float input is x_f and whose input after quantization of everything
before it is x_q, the output error of integers with values Q is, up to a constant,

    |x_f W^T - x_q Q^T|^2 = tr (Q - T) H (Q - T)^T   H = x_q^T x_q                  T = W + P^T H^-1
                                                     P = x_q^T (x_f - x_q) W^T     (T = W without P)

so everything known about the data is one matrix H (in, in) and, to answer also for the error made
by earlier blocks (GPTAQ, arXiv 2504.02692; Qronos, arXiv 2505.11695), one matrix P (in, out).
Only ratios matter: both may be sums or means over tokens, as long as it is the same for both.

H of a wide layer is the largest thing there is while a block is compressed, so its factor is made
in the upper half of the same memory and the lower half keeps H. In float32, which damping by the
usual 0.01 makes enough; with less than about 0.001, float32 may need ten times as much as float64
would (docs/decisions/0020).

In most language models a few tokens, the first of a text above all, have activations hundreds of
times as long as the others' (Sun et al. 2024, "Massive activations", arXiv 2402.17762). Least
squares would fit these few examples to the last detail and nothing else, so that what is right on
the calibration text is wild on another. `counted` limits what one token is worth in both sums.

The first token of a text is one of hundreds, and in most models the one that half of all attention
rests on (Xiao et al. 2024, "attention sinks", arXiv 2309.17453); what enters a module for it often
lies along a direction of its own. Error feedback moves the others' errors there, where a mean over
tokens does not see them (docs/decisions/0021). `leading` makes it
count for more (as in RSQ, Sung et al. 2025, arXiv 2503.01820).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = 0.01
LARGEST_DAMPING = 1.0  # beyond it the data would hardly be heard any more
PART = 512  # rows or columns that exist a second time


@dataclass(frozen=True)
class Factor:
    """D = H + damping * mean(diagonal of H), and D = U U^T, in one matrix.

    matrix (in, in): U on and above the diagonal (R = U^-1 after `inverted`), D below it; diagonal
    (in,): D's. Inputs are in the order of their turns. damping: as a share of the mean.
    """

    matrix: Tensor
    diagonal: Tensor
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
    factors = torch.ones(int(tokens.sum()), 1)
    some = tokens > 0
    factors[(tokens.cumsum(0) - tokens)[some]] = weight[some, None]
    return factors


def turns(diagonal: Tensor, size: int, act_order: bool) -> Tensor:
    """The inputs in the order of their turns, large diagonals first (act-order): groups of `size`
    neighbours by their mean, so that these follow each other, inputs within one by their own."""
    index = torch.arange(len(diagonal)).reshape(-1, size)
    if not act_order:
        return index.reshape(-1)
    groups = diagonal.reshape(-1, size)
    within = groups.argsort(dim=1, descending=True, stable=True)
    by_mean = groups.mean(1).argsort(descending=True, stable=True)
    return index.gather(1, within)[by_mean].reshape(-1)


def factored(hessian: Tensor, order: Tensor, damping: float = DAMPING) -> Factor:
    """Factor H with the least damping that lets it: `damping`, or that times 10, 100, ...

    hessian (in, in) float32, symmetric and not negative, which becomes the factor's matrix; order
    (in,): the turns. An input that was 0 on every token gets the mean on the diagonal. Raises
    ValueError when it holds NaN or infinity, is zero, or cannot be factored with damping up to 1.
    """
    if not all(bool(torch.isfinite(rows).all()) for rows in hessian.split(PART)):
        raise ValueError("hessian: holds NaN or infinity")
    dead = hessian.diagonal() <= 0
    if bool(dead.all()):
        raise ValueError("hessian: zero; this module saw no input")
    hessian[dead], hessian[:, dead] = 0.0, 0.0
    _take_turns(hessian, order)
    diagonal = hessian.diagonal().clone()
    mean = float(diagonal[~dead[order]].double().mean())
    diagonal[dead[order]] = mean
    share = damping
    while True:
        factor = Factor(hessian, diagonal + share * mean, share)
        _cholesky(whole(factor))
        if bool(torch.isfinite(hessian.diagonal()).all()):
            return factor
        share = max(share * 10, 1e-6)
        if share > LARGEST_DAMPING:
            raise ValueError(f"hessian: not positive even with damping {share / 10:g}")


def whole(factor: Factor) -> Tensor:
    """D (in, in), in the order of the turns, where the factor was: it is lost."""
    matrix = factor.matrix
    for rows in _parts(len(matrix)):
        matrix[rows, rows.stop :] = matrix[rows.stop :, rows].T
        below = matrix[rows, rows].tril(-1)
        matrix[rows, rows] = below + below.T
    matrix.diagonal().copy_(factor.diagonal)
    return matrix


def target(weight: Tensor, factor: Factor, order: Tensor, P: Tensor | None) -> Tensor:
    """T^T (in, out) in the order of the turns: what codes should come close to in the metric of H.

    weight (out, in); P (in, out), whose memory is used, or None when the inputs are the float
    ones. What damping adds pulls towards the weight itself; dead inputs keep it. Raises ValueError
    for a P that holds NaN or infinity.
    """
    if P is None:
        return weight.T[order]
    for columns in P.split(PART, 1):
        if not bool(torch.isfinite(columns).all()):
            raise ValueError("P: holds NaN or infinity")
        columns.copy_(columns[order])
    _solve(factor.matrix, P)
    for columns, rows in zip(P.split(PART, 1), weight.split(PART), strict=True):
        columns.add_(rows.T[order])
    return P


def inverted(factor: Factor) -> Tensor:
    """The factor's matrix, with R = U^-1 in place of U: R^T R is the inverse of D."""
    u = factor.matrix
    for rows in _parts(len(u)):
        one = torch.eye(rows.stop - rows.start)
        corner = torch.linalg.solve_triangular(u[rows, rows].triu(), one, upper=True)
        for up in _parts(rows.start):
            done = u[up, up.start : rows.start].clone()
            done[:, : up.stop - up.start].triu_()
            u[up, rows] = done @ u[up.start : rows.start, rows] @ -corner
        u[rows, rows] = u[rows, rows].tril(-1) + corner
    return u


def _parts(size: int) -> list[slice]:
    return [slice(start, min(start + PART, size)) for start in range(0, size, PART)]


def _take_turns(matrix: Tensor, order: Tensor) -> None:
    """Rows and columns of a symmetric matrix (in, in) in another order, in place."""
    for _ in ("columns", "rows, which are columns of its transpose"):
        for rows in matrix.split(PART):
            rows.copy_(rows[:, order])
        for rows in _parts(len(matrix)):
            matrix[rows, rows] = matrix[rows, rows].T.clone()
            right = matrix[rows, rows.stop :].clone()
            matrix[rows, rows.stop :] = matrix[rows.stop :, rows].T
            matrix[rows.stop :, rows] = right.T


def _cholesky(matrix: Tensor) -> None:
    """U on and above the diagonal, with A = U U^T; NaN on the diagonal when A has no such factor.

    From the last block to the first; what is below the diagonal stays.
    """
    for rows in reversed(_parts(len(matrix))):
        lower, failed = torch.linalg.cholesky_ex(matrix[rows, rows].flip(0, 1))
        if int(failed):
            matrix.diagonal()[rows] = torch.nan
            return
        corner = lower.flip(0, 1)
        matrix[rows, rows] = matrix[rows, rows].tril(-1) + corner
        above = matrix[: rows.start, rows]
        above.copy_(torch.linalg.solve_triangular(corner.T, above, upper=False, left=False))
        for up in _parts(rows.start):
            matrix[up, up] -= (above[up] @ above[up].T).triu()
            matrix[up, up.stop : rows.start].addmm_(above[up], above[up.stop :].T, alpha=-1)


def _solve(u: Tensor, x: Tensor) -> None:
    """x (in, out) becomes the y with U U^T y = x. u: U on and above the diagonal."""
    parts = _parts(len(u))
    for rows in reversed(parts):
        x[rows].addmm_(u[rows, rows.stop :], x[rows.stop :], alpha=-1)
        x[rows] = torch.linalg.solve_triangular(u[rows, rows].triu(), x[rows], upper=True)
    for rows in parts:
        x[rows].addmm_(u[: rows.start, rows].T, x[: rows.start], alpha=-1)
        corner = u[rows, rows].triu().T
        x[rows] = torch.linalg.solve_triangular(corner, x[rows], upper=False)


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """tr D H D^T for the difference D (out, in) of two weights: the squared error of the outputs
    over the tokens that H (in, in) sums up."""
    return float(((difference @ hessian) * difference).double().sum())
