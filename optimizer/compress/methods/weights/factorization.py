"""Factor a damped Hessian in its own memory:

    D = H + damping * mean(diag H) * I = U U^T     Hinv = U^-1     D^-1 = Hinv^T Hinv

GPTQ and SparseGPT need three things of D, one after the other: D^-1 P for the target, the upper
triangular Hinv for error feedback, and D for refinement. H (in, in) of a wide layer is the largest
tensor in memory while a block is compressed, so all three share its memory: on and above the
diagonal lies U, then Hinv, then D again; below it always H. D's diagonal is stored separately.
Beyond that only PART rows or columns exist a second time.

float32 is precise enough with the usual damping of 0.01; below about 0.001 it may need ten times
as much as float64 would (docs/decisions/0020).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_DAMPING = 1.0  # with more, D is nearly a multiple of I and the data no longer matter
PART = 512  # rows or columns that exist a second time


@dataclass(frozen=True)
class Factorization:
    """Factored damped Hessian D = U U^T in the memory of one matrix, by which weights are rounded
    or pruned.

    matrix: (in, in), U on and above the diagonal, H below it
    diagonal: (in,), diagonal of D
    damping: damping that was needed, as a share of the mean of H's diagonal
    """

    matrix: Tensor
    diagonal: Tensor
    damping: float

    def solve(self, P: Tensor) -> None:
        """Overwrite P (in, out) with D^-1 P, D the damped Hessian. Before `invert`."""
        U, parts = self.matrix, _parts(len(self.matrix))
        for rows in reversed(parts):
            P[rows].addmm_(U[rows, rows.stop :], P[rows.stop :], alpha=-1)
            P[rows] = torch.linalg.solve_triangular(U[rows, rows].triu(), P[rows], upper=True)
        for rows in parts:
            P[rows].addmm_(U[: rows.start, rows].T, P[: rows.start], alpha=-1)
            corner = U[rows, rows].triu().T
            P[rows] = torch.linalg.solve_triangular(corner, P[rows], upper=False)

    def invert(self) -> Tensor:
        """Overwrite the Hessian's factor U with Hinv and return it; below its diagonal lies H."""
        U = self.matrix
        for rows in _parts(len(U)):
            one = torch.eye(rows.stop - rows.start, device=U.device)
            corner = torch.linalg.solve_triangular(U[rows, rows].triu(), one, upper=True)
            for up in _parts(rows.start):
                done = U[up, up.start : rows.start].clone()
                done[:, : up.stop - up.start].triu_()
                U[up, rows] = done @ U[up.start : rows.start, rows] @ -corner
            U[rows, rows] = U[rows, rows].tril(-1) + corner
        return U

    def restore(self) -> Tensor:
        """Turn the factor (U or Hinv) back into D (in, in), the damped H, in the same memory, and
        return it."""
        D = self.matrix
        for rows in _parts(len(D)):
            D[rows, rows.stop :] = D[rows.stop :, rows].T
            below = D[rows, rows].tril(-1)
            D[rows, rows] = below + below.T
        D.diagonal().copy_(self.diagonal)
        return D


def factorize(H: Tensor, damping: float) -> Factorization:
    """Factor the Hessian H with the least damping that lets it: `damping`, or that times 10, 100,
    ...

    H: (in, in) float32, symmetric, positive semidefinite; overwritten. An input that was 0 on every
        token gets the mean on the diagonal
    damping: share of the mean of H's diagonal

    Raises ValueError when H holds NaN or infinity, is zero, or cannot be factored with damping up
    to 1.
    """
    if not all(bool(torch.isfinite(rows).all()) for rows in H.split(PART)):
        raise ValueError("hessian: holds NaN or infinity")
    dead = H.diagonal() <= 0
    if bool(dead.all()):
        raise ValueError("hessian: zero; this module saw no input")
    H[dead], H[:, dead] = 0.0, 0.0
    diagonal = H.diagonal().clone()
    mean = float(diagonal[~dead].double().mean())
    diagonal[dead] = mean
    while True:
        factor = Factorization(H, diagonal + damping * mean, damping)
        _cholesky(factor.restore())
        if bool(torch.isfinite(H.diagonal()).all()):
            return factor
        damping = max(damping * 10, 1e-6)
        if damping > LARGEST_DAMPING:
            raise ValueError(f"hessian: not positive even with damping {damping / 10:g}")


def permute(H: Tensor, order: Tensor) -> None:
    """Put rows and columns of a symmetric Hessian H (in, in) into another order, in place."""
    for _ in ("columns", "rows, which are columns of its transpose"):
        for rows in H.split(PART):
            rows.copy_(rows[:, order])
        for rows in _parts(len(H)):
            H[rows, rows] = H[rows, rows].T.clone()
            right = H[rows, rows.stop :].clone()
            H[rows, rows.stop :] = H[rows.stop :, rows].T
            H[rows.stop :, rows] = right.T


def _cholesky(D: Tensor) -> None:
    """Overwrite the damped Hessian D on and above the diagonal with U, D = U U^T, from the last
    block to the first.

    The diagonal becomes NaN where D is not positive definite; D below the diagonal stays.
    """
    for rows in reversed(_parts(len(D))):
        lower, failed = torch.linalg.cholesky_ex(D[rows, rows].flip(0, 1))
        if int(failed):
            D.diagonal()[rows] = torch.nan
            return
        corner = lower.flip(0, 1)
        D[rows, rows] = D[rows, rows].tril(-1) + corner
        above = D[: rows.start, rows]
        above.copy_(torch.linalg.solve_triangular(corner.T, above, upper=False, left=False))
        for up in _parts(rows.start):
            D[up, up] -= (above[up] @ above[up].T).triu()
            D[up, up.stop : rows.start].addmm_(above[up], above[up.stop :].T, alpha=-1)


def _parts(size: int) -> list[slice]:
    return [slice(start, min(start + PART, size)) for start in range(0, size, PART)]
