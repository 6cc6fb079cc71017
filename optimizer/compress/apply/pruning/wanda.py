"""Apply Wanda: the lengths of a weight's inputs are the root of its second moments' diagonal."""

from __future__ import annotations

from optimizer.compress.apply.pruning.pruning import Prunable, Sparse, label
from optimizer.compress.methods.pruning.wanda import wanda


def prune(weight: Prunable) -> Sparse:
    """What is small beside its input is zero; the rest stays."""
    assert weight.second_moments is not None
    norms = weight.second_moments.diagonal().clamp(min=0).sqrt()
    mask = wanda(weight.values.float(), norms, weight.sparsity.shape)
    return Sparse(weight.values.float() * mask, mask, label(weight.sparsity))
