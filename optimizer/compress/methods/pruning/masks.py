"""Make a pruning mask: of the weights, those with the highest scores stay, by the pattern."""

from __future__ import annotations

from torch import Tensor

from optimizer.foundation.sparsity import Pattern


def keep_highest(scores: Tensor, pattern: Pattern) -> Tensor:
    """Make the pruning mask (out, in) of scores (out, in), False for the pattern's number of zeros
    in each group.

    Of equal scores the later input is kept. Raises ValueError where N:M does not divide the inputs.
    """
    groups = pattern.grouped(scores)
    ranks = groups.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
    return (ranks >= pattern.zeros(scores.shape[1])).reshape(scores.shape)
