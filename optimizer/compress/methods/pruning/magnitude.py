"""Magnitude pruning: what is small is zero. Per output, so that no output is emptied."""

from __future__ import annotations

import torch
from torch import Tensor

from optimizer.compress.methods.pruning.masks import highest
from optimizer.foundation.sparsity import Pattern


def magnitude(W: Tensor, pattern: Pattern) -> Tensor:
    """The mask (out, in) of W (out, in), True where kept. Raises ValueError for NaN or infinity."""
    if not bool(torch.isfinite(W).all()):
        raise ValueError("weight: holds NaN or infinity")
    return highest(W.abs(), pattern)
