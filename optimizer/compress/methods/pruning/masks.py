"""Keep what scores highest: scores (out, in), pattern -> mask (out, in), True where kept."""

from __future__ import annotations

from torch import Tensor

from optimizer.foundation.sparsity import Pattern


def highest(scores: Tensor, pattern: Pattern) -> Tensor:
    """Of every group that the pattern compares, all but its number of zeros. Of equal scores the
    later input is kept. Raises ValueError where N:M does not divide the inputs."""
    groups = pattern.grouped(scores)
    ranks = groups.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
    return (ranks >= pattern.zeros(scores.shape[1])).reshape(scores.shape)
