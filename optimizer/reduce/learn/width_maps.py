"""Map the hidden states of a narrower (or wider) student to its teacher's width.

For each block of the student there is one linear map h -> W h + b, trained with the student and
discarded afterwards. It starts from the principal components of the teacher's states on the first
texts: b is their mean, W their first directions, scaled to the size of the student's states. So the
student learns the teacher's coordinates along them. (Romero et al. 2015, arXiv 1412.6550, and Jiao
et al. 2020, arXiv 1909.10351, start such maps at random.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from optimizer.recipe.recover import LossWeights
from optimizer.reduce.learn.pair import Batch, TeacherAndStudent
from optimizer.reduce.methods.principal import Sums, find_components

TOKENS = 8  # tokens per dimension of the teacher, enough to separate its directions
STATES = LossWeights(output=0, hidden=1)


@torch.no_grad()
def fit_initial_maps(pair: TeacherAndStudent, batches: Iterator[Batch]) -> nn.ModuleList:
    """Fit one linear map per block of the student, from its hidden states to the teacher's.

    batches: texts to fit on, read until there are enough tokens
    """
    narrow, width = pair.widths
    sums = [Sums(width) for _ in pair.pairing.states]
    sizes = [0.0] * len(sums)
    while sums[0].rows < TOKENS * width:
        batch = next(batches)
        student, teacher = pair.answers(batch, STATES)
        real = batch["attention_mask"].bool()
        for i, state in enumerate(pair.pairing.states):
            sums[i].add(teacher.hidden_states[state].cpu()[real])
            sizes[i] += float(
                student.hidden_states[i + 1].cpu()[real].double().square().mean(-1).sum()
            )
    maps = []
    for one, size in zip(sums, sizes, strict=True):
        components = find_components(one, narrow)
        scale = components.spread / max((size / one.rows) ** 0.5, torch.finfo(torch.float32).tiny)
        linear = nn.utils.skip_init(nn.Linear, narrow, width)
        linear.weight.copy_(components.directions * scale)
        linear.bias.copy_(components.mean)
        maps.append(linear.requires_grad_(False))
    return nn.ModuleList(maps).to(pair.device)
