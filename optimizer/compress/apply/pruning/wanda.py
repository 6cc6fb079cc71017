"""Apply Wanda, with |X_j| from the diagonal of H."""

from __future__ import annotations

from optimizer.compress.apply.pruning.pruning import Prunable, Sparse, label
from optimizer.compress.methods.pruning.wanda import wanda


def prune(weight: Prunable) -> Sparse:
    """Prune a weight by Wanda: zero the values with the smallest |W_ij| * |X_j|."""
    assert weight.second_moments is not None
    norms = weight.second_moments.diagonal().clamp(min=0).sqrt()
    mask = wanda(weight.values.float(), norms, weight.sparsity.shape)
    return Sparse(weight.values.float() * mask, mask, label(weight.sparsity))
