"""Assign texts to training steps: the same on every machine, with little padding.

Texts of similar length share a batch, drawn anew in each epoch: an epoch's texts are shuffled, cut
into stretches of SPAN batches, sorted by length within each, cut into batches, and the batches
shuffled. Only full batches are used, so every step has the same weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SPAN = 32  # batches: enough that lengths in one differ little, few enough that its texts vary


def choose_batch(step: int, lengths: Sequence[int], batch_size: int, seed: int) -> list[int]:
    """Return the indices of the texts in the batch of a training step.

    step: number of the step
    lengths: length of every text in tokens
    seed: seed of the shuffles

    Raises ValueError for fewer texts than batch_size.
    """
    epoch, place = divmod(step, count_steps(len(lengths), batch_size))
    return _epoch(lengths, batch_size, seed, epoch)[place]


def count_steps(texts: int, batch_size: int) -> int:
    """Return the number of training steps of an epoch, in which every text is used at most once."""
    if texts < batch_size:
        raise ValueError(f"{texts} texts are fewer than a batch of {batch_size}")
    return texts // batch_size


def _epoch(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    count = count_steps(len(lengths), batch_size)
    drawn = torch.randperm(len(lengths), generator=generator)[: count * batch_size].tolist()
    batches = []
    for start in range(0, len(drawn), SPAN * batch_size):
        stretch = sorted(drawn[start : start + SPAN * batch_size], key=lambda i: (lengths[i], i))
        batches += [stretch[i : i + batch_size] for i in range(0, len(stretch), batch_size)]
    return [batches[i] for i in torch.randperm(count, generator=generator).tolist()]
