"""Leave a weight in float after pruning."""

from __future__ import annotations

from torch import Tensor

from optimizer.compress.apply.pruning.pruning import Prunable, prune


def prune_weight(weight: Prunable) -> tuple[Tensor, str]:
    """The pruned float values, and a note for the report."""
    sparse = prune(weight)
    return sparse.values, sparse.note
