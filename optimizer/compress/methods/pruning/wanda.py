"""Wanda (Sun et al. 2023, arXiv 2306.11695): a weight counts by its size times the length of its
input over the calibration tokens, |W_ij| * |x_j|, compared within each output. Nothing is adjusted.

By itself it is the OBS cost of SparseGPT with H taken for diagonal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizer.compress.methods.pruning.masks import highest
from optimizer.foundation.sparsity import Pattern


def wanda(W: Tensor, norms: Tensor, pattern: Pattern) -> Tensor:
    """The mask (out, in), True where kept. W (out, in); norms (in,): of the inputs.

    Raises ValueError for NaN or infinity in either.
    """
    if not bool(torch.isfinite(W).all()):
        raise ValueError("weight: holds NaN or infinity")
    if not bool(torch.isfinite(norms).all()):
        raise ValueError("inputs: their norms hold NaN or infinity")
    return highest(W.abs() * norms, pattern)
