"""Apply magnitude pruning, without calibration."""

from __future__ import annotations

from optimizer.compress.apply.pruning.pruning import Prunable, Sparse, label
from optimizer.compress.methods.pruning.magnitude import magnitude


def prune(weight: Prunable) -> Sparse:
    """Zero the smallest weights."""
    mask = magnitude(weight.values.float(), weight.sparsity.shape)
    return Sparse(weight.values.float() * mask, mask, label(weight.sparsity))
