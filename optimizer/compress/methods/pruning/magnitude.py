"""Magnitude pruning: zero the smallest weights of each output."""

from __future__ import annotations

import torch
from torch import Tensor

from optimizer.compress.methods.pruning.masks import keep_highest
from optimizer.foundation.sparsity import Pattern


def magnitude(W: Tensor, pattern: Pattern) -> Tensor:
    """Choose by magnitude the mask (out, in) of W (out, in), False where pruned. Raises ValueError
    for NaN or infinity."""
    if not bool(torch.isfinite(W).all()):
        raise ValueError("weight: holds NaN or infinity")
    return keep_highest(W.abs(), pattern)
