"""Influence of a block on its hidden states (ShortGPT, Men et al. 2024, arXiv 2403.03853)."""

from __future__ import annotations

import torch
from torch import Tensor


def measure_influence(before: Tensor, after: Tensor) -> float:
    """Return the influence of a block: 1 - mean cosine of its hidden states before and after.

    before, after: (tokens, features)
    """
    cosine = torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1)
    return float(1 - cosine.mean())
