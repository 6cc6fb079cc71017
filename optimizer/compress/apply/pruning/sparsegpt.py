"""Apply SparseGPT; compress/apply/weights/rounding.py measures H and P."""

from __future__ import annotations

from optimizer.compress.apply.pruning.pruning import Prunable, Sparse, label
from optimizer.compress.methods.pruning.sparsegpt import sparsegpt


def prune(weight: Prunable) -> Sparse:
    """Prune a weight by SparseGPT: zero weights and adjust the others."""
    assert weight.second_moments is not None
    options = weight.sparsity.sparsegpt.model_copy(
        update={"act_order": weight.act_order, "damping": weight.damping}
    )
    pruned = sparsegpt(
        weight.values,
        weight.second_moments,
        weight.sparsity.shape,
        options,
        P=weight.cross_moment,
        in_place=weight.in_place,
    )
    return Sparse(
        pruned.values, pruned.mask, f"{label(weight.sparsity)}, damping {pruned.damping:g}"
    )
