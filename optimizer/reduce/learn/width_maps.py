"""From the hidden states of a narrower (or wider) student to its teacher's width.

For each block of the student one linear map, h -> W h + b, trained along with the student and
thrown away after. It starts from the principal components of the teacher's states on the first
texts that are learned from: b is their mean, W their first directions, so that the student is
asked for the teacher's coordinates along them, in the size that its own states have (Romero et al.
2015, arXiv 1412.6550, learn such a map from nothing; Jiao et al. 2020, arXiv 1909.10351, too).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from optimizer.recipe.recover import LossWeights
from optimizer.reduce.learn.pair import Batch, Pair
from optimizer.reduce.methods.principal import Sums, principal

TOKENS = 8  # for each of the teacher's dimensions: enough to tell its directions apart
STATES = LossWeights(output=0, hidden=1)


@torch.no_grad()
def started(pair: Pair, batches: Iterator[Batch]) -> nn.ModuleList:
    """One for each block of the student. batches: of texts that are learned from, as many as it
    takes."""
    own, width = pair.widths
    sums = [Sums(width) for _ in pair.pairing.states]
    sizes = [0.0] * len(sums)
    while sums[0].rows < TOKENS * width:
        batch = next(batches)
        mine, theirs = pair.answers(batch, STATES)
        real = batch["attention_mask"].bool()
        for i, state in enumerate(pair.pairing.states):
            sums[i].add(theirs.hidden_states[state].cpu()[real])
            sizes[i] += float(
                mine.hidden_states[i + 1].cpu()[real].double().square().mean(-1).sum()
            )
    maps = []
    for one, size in zip(sums, sizes, strict=True):
        components = principal(one, own)
        scale = components.spread / max((size / one.rows) ** 0.5, torch.finfo(torch.float32).tiny)
        linear = nn.utils.skip_init(nn.Linear, own, width)
        linear.weight.copy_(components.directions * scale)
        linear.bias.copy_(components.mean)
        maps.append(linear.requires_grad_(False))
    return nn.ModuleList(maps).to(pair.device)
