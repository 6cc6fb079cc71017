"""The hidden states that enter every use of a block, kept under a byte budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from optimizer.compress.walk.activation_buffer import Budget, Buffer
from optimizer.compress.walk.blocks import Stream, Use
from optimizer.compress.walk.capture import Batch, capture
from optimizer.foundation.progress import bar
from optimizer.model.checkpoint.model import materialize, release
from optimizer.reduce.structure.layout import Layout


def opened_stream(
    layout: Layout,
    blocks: Sequence[str],
    batches: Sequence[Batch],
    folder: Path,
    *,
    reference: bool = False,
) -> Stream:
    """The stream before the first block, without the uses of blocks that are not in `blocks`.
    reference: a second one beside it. What memory does not hold goes to files below `folder`."""
    budget = Budget(layout.section.compress.memory_bytes)
    hidden = Buffer(budget, folder / "hidden")
    second = Buffer(budget, folder / "reference") if reference else None
    stream = capture(layout.source, layout.blocks, batches, hidden, second)
    stream.uses = [[use for use in uses if use.block in blocks] for uses in stream.uses]
    stream.float = layout.section.compress.decided
    return stream


def entering(layout: Layout, stream: Stream, folder: Path) -> list[Buffer]:
    """For each use of a block what enters it, a tensor per batch; last what the last one gives.

    stream: before the first block; what its budget does not hold goes to files below `folder`.
    """
    assert isinstance(stream.hidden, Buffer)
    states = [stream.hidden]
    model, tensors = layout.source.model, layout.source.tensors
    for use in bar(range(len(stream.uses[0])), "reduce: forward"):
        block = stream.uses[0][use].block
        materialize(model, block, tensors)
        after = Buffer(stream.hidden.budget, folder / f"after-{use:04d}")
        for i, hidden in enumerate(states[-1]):
            after.append(applied(layout, stream, stream.uses[i][use], hidden))
        release(model, block)
        states.append(after)
    return states


def passed(layout: Layout, stream: Stream, hidden: Buffer, first: int = 0) -> Buffer:
    """`hidden`, which enters use `first` of a block, changed into what the last use gives."""
    for use in range(first, len(stream.uses[0])):
        block = stream.uses[0][use].block
        materialize(layout.source.model, block, layout.source.tensors)
        for i in range(len(hidden)):
            hidden[i] = applied(layout, stream, stream.uses[i][use], hidden[i])
        release(layout.source.model, block)
    return hidden


def applied(layout: Layout, stream: Stream, use: Use, hidden: Tensor) -> Tensor:
    """What a use of a block, whose weights are in memory, makes of hidden states."""
    with torch.no_grad(), stream.products:
        return use.apply(layout.source.model, hidden).float()
