"""Distillation losses: distance of a student from its teacher, with a gradient.

Every loss is 0 exactly where student and teacher agree, with a gradient of zero there. The teacher
is the second argument and gets no gradient.

divergence   logits: KL(teacher || student), nats     Hinton et al. 2015, arXiv 1503.02531
difference   numbers (regression): half the mean squared difference
direction    one vector per text: 1 - cosine
relations    cosines of all pairs of texts in a       Park et al. 2019, arXiv 1904.05068
             batch
hidden       hidden states: relative squared error    Jiao et al. 2020, arXiv 1909.10351
attention    KL of each query's probabilities         Wang et al. 2020, arXiv 2002.10957
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 1024  # rows of logits at once: each is as long as the vocabulary


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Distillation loss: mean over rows of KL(teacher || student) of logits (rows, classes) /
    temperature, times the squared temperature, which keeps the size of the gradient."""
    total = student.new_zeros(())
    for s, t in zip(student.split(ROWS), teacher.split(ROWS), strict=True):
        log_q = (s / temperature).log_softmax(-1)
        log_p = (t.detach() / temperature).log_softmax(-1)
        total = total + (log_p.exp() * (log_p - log_q)).sum()
    return total * (temperature**2 / len(student))


def difference(student: Tensor, teacher: Tensor) -> Tensor:
    """Distillation loss: half the mean squared difference, for models that answer with numbers."""
    return (student - teacher.detach()).square().mean() / 2


def direction(student: Tensor, teacher: Tensor) -> Tensor:
    """Distillation loss: mean over rows of 1 - cosine of vectors (rows, width), computed as half
    the squared distance of the unit vectors, which is exactly 0 where they agree."""
    s, t = functional.normalize(student, dim=-1), functional.normalize(teacher, dim=-1)
    return (s - t.detach()).square().sum(-1).mean() / 2


def relations(student: Tensor, teacher: Tensor) -> Tensor:
    """Distillation loss: mean squared difference of the cosines of all pairs of rows, of student
    and teacher (rows, width), whose widths may differ; 0 for fewer than two rows."""
    rows = len(student)
    if rows < 2:
        return student.sum() * 0
    s, t = functional.normalize(student, dim=-1), functional.normalize(teacher, dim=-1)
    difference = s @ s.T - (t @ t.T).detach()
    return difference.square().sum() / (rows * (rows - 1))


def hidden(student: Tensor, teacher: Tensor, real: Tensor) -> Tensor:
    """Distillation loss: mean over real tokens of |student - teacher|^2 / |teacher|^2, so that the
    massive activations of a few tokens do not dominate.

    student, teacher: (batch, sequence, width)
    real: mask of real tokens (batch, sequence) bool
    """
    s, t = student[real], teacher[real].detach()
    size = t.square().sum(-1).clamp_min(torch.finfo(t.dtype).tiny)
    return ((s - t).square().sum(-1) / size).mean()


def attention(student: Tensor, teacher: Tensor, real: Tensor) -> Tensor:
    """Distillation loss: mean over heads and real queries of KL(teacher || student) of attention
    probabilities.

    student, teacher: (batch, heads, query, key)
    real: mask of real queries (batch, query) bool
    """
    s, t = student.transpose(1, 2)[real], teacher.transpose(1, 2)[real].detach()
    tiny = torch.finfo(s.dtype).tiny
    log_ratio = t.clamp_min(tiny).log() - s.clamp_min(tiny).log()
    return (t * log_ratio).sum(-1).mean()


def pool(states: Tensor, real: Tensor, poolings: Sequence[str]) -> Tensor:
    """Pool hidden states (batch, sequence, width) of teacher or student to vectors (batch, width),
    joined in order.

    real: mask of real tokens (batch, sequence) bool, padding on the right
    poolings: names of harness/contract.py's POOLINGS
    """
    weight = real.to(states.dtype)
    places = torch.arange(1, states.shape[1] + 1, dtype=states.dtype, device=states.device)
    last = (weight * places).argmax(1)
    parts = []
    for name in poolings:
        if name in ("cls", "lasttoken"):
            parts.append(states[:, 0] if name == "cls" else states[torch.arange(len(last)), last])
        elif name == "max":
            parts.append(states.masked_fill(~real[..., None], float("-inf")).amax(1))
        else:
            shares = weight * places if name == "weightedmean" else weight
            total = shares.sum(1, keepdim=True).clamp_min(1)
            total = total.sqrt() if name == "mean_sqrt_len_tokens" else total
            parts.append((states * shares[..., None]).sum(1) / total)
    return torch.cat(parts, -1)
