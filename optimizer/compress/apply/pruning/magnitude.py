"""Apply magnitude pruning, without calibration."""

from __future__ import annotations

from optimizer.compress.apply.pruning.pruning import Prunable, Sparse, label
from optimizer.compress.methods.pruning.magnitude import magnitude


def prune(weight: Prunable) -> Sparse:
    """Prune a weight by magnitude: zero the smallest in each group of the pattern."""
    mask = magnitude(weight.values.float(), weight.sparsity.shape)
    return Sparse(weight.values.float() * mask, mask, label(weight.sparsity))
