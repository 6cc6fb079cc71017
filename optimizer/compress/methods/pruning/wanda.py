"""Wanda (Sun et al. 2023, arXiv 2306.11695): prune the weights of each output with the smallest
|W_ij| * |X_j|, X_j being input j over the calibration tokens. Other weights stay unchanged.

It is the OBS cost of SparseGPT with a diagonal H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizer.compress.methods.pruning.masks import keep_highest
from optimizer.foundation.sparsity import Pattern


def wanda(W: Tensor, norms: Tensor, pattern: Pattern) -> Tensor:
    """Choose by Wanda the mask (out, in) of W (out, in), False where pruned.

    norms: (in,), |X_j|

    Raises ValueError for NaN or infinity in either.
    """
    if not bool(torch.isfinite(W).all()):
        raise ValueError("weight: holds NaN or infinity")
    if not bool(torch.isfinite(norms).all()):
        raise ValueError("inputs: their norms hold NaN or infinity")
    return keep_highest(W.abs() * norms, pattern)
