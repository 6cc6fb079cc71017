"""Principal components of vectors, each weighted by its inverse squared length.

For rows x (Pearson 1901) with weights 1 / |x|^2, so that a few massive activations do not dominate:
the mean and the directions P that minimise sum |x - (mean + P z)|^2 / |x|^2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Sums:
    """Running weighted sums over rows (tokens, width) of hidden states, from which their principal
    components are computed."""

    width: int
    weight: float = 0.0
    rows: int = 0
    total: Tensor = field(init=False)
    square: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.total = torch.zeros(self.width, dtype=torch.float64)
        self.square = torch.zeros(self.width, self.width, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        """Add rows x (tokens, width) of hidden states to the sums."""
        x = x.double()
        weights = 1 / x.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        self.weight += float(weights.sum())
        self.rows += len(x)
        self.total += weights @ x
        self.square += (x * weights[:, None]).T @ x


@dataclass(frozen=True)
class Principal:
    """Principal components of a teacher's or student's hidden states.

    mean: (width,)
    directions: orthonormal columns (width, count), the largest variance first; columns beyond
        the first `width` are zero
    spread: root mean square of the coordinates along the directions
    """

    mean: Tensor
    directions: Tensor
    spread: float


def find_components(sums: Sums, count: int) -> Principal:
    """Compute the first `count` principal components of hidden states, to map widths of student and
    teacher. Raises ValueError without rows."""
    if not sums.rows:
        raise ValueError("no rows")
    mean = sums.total / sums.weight
    covariance = sums.square / sums.weight - torch.outer(mean, mean)
    values, vectors = torch.linalg.eigh(covariance)
    some = min(count, sums.width)
    chosen = vectors.flip(1)[:, :some]
    # The sign of an eigenvector is free: the largest entry is made positive.
    largest = chosen.gather(0, chosen.abs().argmax(0, keepdim=True))
    chosen = chosen * torch.where(largest < 0, -1.0, 1.0)
    directions = torch.zeros(sums.width, count, dtype=torch.float64)
    directions[:, :some] = chosen
    spread = float(values.flip(0)[:some].clamp_min(0).mean().sqrt())
    return Principal(mean, directions, spread)
