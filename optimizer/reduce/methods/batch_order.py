"""Which texts go into which step: the same on every machine, with little padding.

Texts of like length share a batch, but which ones, and when, is drawn anew in each epoch: an
epoch's texts are shuffled, cut into stretches of SPAN batches, sorted by length within each, cut
into batches, and the batches shuffled. Whole batches only, so that every step weighs the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SPAN = 32  # batches: enough that lengths in one differ little, few enough that its texts vary


def batch_of(step: int, lengths: Sequence[int], batch_size: int, seed: int) -> list[int]:
    """The indices of the texts of a step. lengths: of all texts, in tokens.

    Raises ValueError where there are fewer texts than batch_size.
    """
    epoch, place = divmod(step, per_epoch(len(lengths), batch_size))
    return _epoch(lengths, batch_size, seed, epoch)[place]


def per_epoch(texts: int, batch_size: int) -> int:
    """Steps in which every text is seen at most once."""
    if texts < batch_size:
        raise ValueError(f"{texts} texts are fewer than a batch of {batch_size}")
    return texts // batch_size


def _epoch(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    count = per_epoch(len(lengths), batch_size)
    drawn = torch.randperm(len(lengths), generator=generator)[: count * batch_size].tolist()
    batches = []
    for start in range(0, len(drawn), SPAN * batch_size):
        stretch = sorted(drawn[start : start + SPAN * batch_size], key=lambda i: (lengths[i], i))
        batches += [stretch[i : i + batch_size] for i in range(0, len(stretch), batch_size)]
    return [batches[i] for i in torch.randperm(count, generator=generator).tolist()]
