"""How far the outputs of two models lie apart, one number per text or token."""

from __future__ import annotations

import torch
from torch import Tensor


def kullback_leibler(reference: Tensor, logits: Tensor) -> Tensor:
    """(rows,): KL(p || q) in nats of the distributions that logits (rows, classes) give. In their
    own float type: of a vocabulary float64 takes as long as the blocks do."""
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def angular(reference: Tensor, values: Tensor) -> Tensor:
    """(rows,): 1 - cosine of vectors (rows, features)."""
    return 1 - torch.nn.functional.cosine_similarity(reference.double(), values.double(), dim=-1)
