"""Distances between the outputs of two models, one number per text or token."""

from __future__ import annotations

import torch
from torch import Tensor


def kullback_leibler(reference: Tensor, logits: Tensor) -> Tensor:
    """Compute, between a reduced model's answers and the reference's, KL(p || q) in nats, (rows,),
    where p and q are the softmax of logits (rows, classes).

    It is computed in the float type of the logits: for a vocabulary, float64 takes as long as the
        blocks.
    """
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def add_absence(logits: Tensor) -> Tensor:
    """Turn logits of a multi-label model that is reduced (rows, labels) into (rows * labels, 2),
    each label and its absence, such that the softmax of a pair gives the label's sigmoid."""
    return torch.stack((logits, torch.zeros_like(logits)), -1).flatten(0, -2)


def measure_angle(reference: Tensor, values: Tensor) -> Tensor:
    """Compute, between a reduced model's vectors and the reference's, 1 - cosine of each, (rows,),
    of vectors (rows, features)."""
    return 1 - torch.nn.functional.cosine_similarity(reference.double(), values.double(), dim=-1)
