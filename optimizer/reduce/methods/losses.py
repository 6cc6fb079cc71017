"""How far a student is from its teacher, as numbers that have a gradient.

Every loss is 0 exactly when student and teacher agree, and has no gradient there. The teacher is
the second argument and takes no gradient.

divergence   logits: KL(teacher || student), nats     Hinton et al. 2015, arXiv 1503.02531
difference   numbers (regression): half the mean squared difference
direction    one vector per text: 1 - cosine
relations    every pair of texts in a batch: the      Park et al. 2019, arXiv 1904.05068
             cosines between them
hidden       hidden states: relative squared error    Jiao et al. 2020, arXiv 1909.10351
attention    KL of each query's probabilities         Wang et al. 2020, arXiv 2002.10957
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 1024  # of logits at once: a vocabulary makes each of them long


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean over rows of KL(teacher || student) of (rows, classes) logits divided by the
    temperature, times its square so that the gradient keeps its size."""
    total = student.new_zeros(())
    for mine, theirs in zip(student.split(ROWS), teacher.split(ROWS), strict=True):
        log_q = (mine / temperature).log_softmax(-1)
        log_p = (theirs.detach() / temperature).log_softmax(-1)
        total = total + (log_p.exp() * (log_p - log_q)).sum()
    return total * (temperature**2 / len(student))


def difference(student: Tensor, teacher: Tensor) -> Tensor:
    """Half the mean squared difference, of numbers that a model answers with."""
    return (student - teacher.detach()).square().mean() / 2


def direction(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over rows of 1 - cosine, of (rows, width) vectors; as half the squared distance of the
    directions, which is exactly 0 where they agree."""
    mine, theirs = functional.normalize(student, dim=-1), functional.normalize(teacher, dim=-1)
    return (mine - theirs.detach()).square().sum(-1).mean() / 2


def relations(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference of the cosines of all pairs of rows; 0 for fewer than two rows.
    student and teacher (rows, width); the widths may differ."""
    rows = len(student)
    if rows < 2:
        return student.sum() * 0
    mine, theirs = functional.normalize(student, dim=-1), functional.normalize(teacher, dim=-1)
    difference = mine @ mine.T - (theirs @ theirs.T).detach()
    return difference.square().sum() / (rows * (rows - 1))


def hidden(student: Tensor, teacher: Tensor, real: Tensor) -> Tensor:
    """Mean over real tokens of |student - teacher|^2 / |teacher|^2, so that the massive activations
    of a few tokens count no more than others.

    student, teacher (batch, sequence, width); real (batch, sequence) bool.
    """
    mine, theirs = student[real], teacher[real].detach()
    size = theirs.square().sum(-1).clamp_min(torch.finfo(theirs.dtype).tiny)
    return ((mine - theirs).square().sum(-1) / size).mean()


def attention(student: Tensor, teacher: Tensor, real: Tensor) -> Tensor:
    """Mean over heads and real queries of KL(teacher || student) of attention probabilities.

    student, teacher (batch, heads, query, key); real (batch, query) bool.
    """
    mine, theirs = student.transpose(1, 2)[real], teacher.transpose(1, 2)[real].detach()
    tiny = torch.finfo(mine.dtype).tiny
    log_ratio = theirs.clamp_min(tiny).log() - mine.clamp_min(tiny).log()
    return (theirs * log_ratio).sum(-1).mean()


def pooled(states: Tensor, real: Tensor, pooling: str) -> Tensor:
    """(batch, width) of hidden states (batch, sequence, width), as the contract's pooling says:
    "mean" of the real tokens, or "cls", the first one."""
    if pooling == "cls":
        return states[:, 0]
    weight = real.to(states.dtype)[..., None]
    return (states * weight).sum(1) / weight.sum(1).clamp_min(1)
