"""Compute the hidden states that enter every use of a block, under a byte budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from optimizer.compress.walk.activation_buffer import Buffer, BufferBudget
from optimizer.compress.walk.blocks import BlockUse, CalibrationStream
from optimizer.compress.walk.capture import Batch, capture
from optimizer.foundation.progress import bar
from optimizer.model.checkpoint.model import materialize, release
from optimizer.reduce.structure.layout import ReducedCheckpoint


def open_stream(
    layout: ReducedCheckpoint,
    blocks: Sequence[str],
    batches: Sequence[Batch],
    folder: Path,
    *,
    reference: bool = False,
) -> CalibrationStream:
    """Open the stream of hidden states before the first block, on which reduce chooses blocks and
    units.

    blocks: blocks whose uses the stream keeps
    folder: folder for states that exceed the budget
    reference: True for a second stream of the float model
    """
    budget = BufferBudget(layout.section.compress.memory_bytes)
    hidden = Buffer(budget, folder / "hidden")
    second = Buffer(budget, folder / "reference") if reference else None
    stream = capture(layout.source, layout.blocks, batches, hidden, second)
    stream.uses = [[use for use in uses if use.block in blocks] for uses in stream.uses]
    stream.float = layout.section.compress.decided
    return stream


def record_entering(
    layout: ReducedCheckpoint, stream: CalibrationStream, folder: Path
) -> list[Buffer]:
    """Return for reduce the hidden states that enter each use of a block, one tensor per batch. The
    last item is the output of the last use.

    stream: stream before the first block
    folder: folder for states that exceed the budget
    """
    assert isinstance(stream.hidden, Buffer)
    states = [stream.hidden]
    model, tensors = layout.source.model, layout.source.tensors
    for use in bar(range(len(stream.uses[0])), "reduce: forward"):
        block = stream.uses[0][use].block
        materialize(model, block, tensors)
        after = Buffer(stream.hidden.budget, folder / f"after-{use:04d}")
        for i, hidden in enumerate(states[-1]):
            after.append(apply_use(layout, stream, stream.uses[i][use], hidden))
        release(model, block)
        states.append(after)
    return states


def pass_through(
    layout: ReducedCheckpoint, stream: CalibrationStream, hidden: Buffer, first: int = 0
) -> Buffer:
    """Run for reduce the uses of blocks from number `first` on. `hidden`, the input of that use, is
    overwritten with the last use's output and returned."""
    for use in range(first, len(stream.uses[0])):
        block = stream.uses[0][use].block
        materialize(layout.source.model, block, layout.source.tensors)
        for i in range(len(hidden)):
            hidden[i] = apply_use(layout, stream, stream.uses[i][use], hidden[i])
        release(layout.source.model, block)
    return hidden


def apply_use(
    layout: ReducedCheckpoint, stream: CalibrationStream, use: BlockUse, hidden: Tensor
) -> Tensor:
    """Return for reduce the output of one use of a block, whose weights are in memory."""
    with torch.no_grad(), stream.products:
        return use.apply(layout.source.model, hidden).float()
