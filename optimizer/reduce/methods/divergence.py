"""Distance of the outputs of two models, one number per text or token."""

from __future__ import annotations

import torch
from torch import Tensor


def kullback_leibler(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(p || q) in nats (rows,) of the distributions of logits (rows, classes). It is computed in
    their float type: for a vocabulary, float64 takes as long as the blocks."""
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def add_absence(logits: Tensor) -> Tensor:
    """Logits (rows * labels, 2) of each label and its absence, from those of a multi-label model
    (rows, labels): the softmax of a pair is the label's sigmoid."""
    return torch.stack((logits, torch.zeros_like(logits)), -1).flatten(0, -2)


def measure_angle(reference: Tensor, values: Tensor) -> Tensor:
    """1 - cosine (rows,) of vectors (rows, features)."""
    return 1 - torch.nn.functional.cosine_similarity(reference.double(), values.double(), dim=-1)
