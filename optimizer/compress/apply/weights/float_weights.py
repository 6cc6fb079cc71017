"""Apply nothing: a weight stays float, as the sparsity section leaves it."""

from __future__ import annotations

from torch import Tensor

from optimizer.compress.apply.pruning.pruning import Prunable, pruned


def prune_weight(weight: Prunable) -> tuple[Tensor, str]:
    """The float values, and what the report says."""
    sparse = pruned(weight)
    return sparse.values, sparse.note
