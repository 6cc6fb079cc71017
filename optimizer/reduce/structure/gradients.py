"""Compute gradients of the log-likelihood by a mask of every unit, on calibration text.

One block is in memory at a time: a forward sweep stores the input of each use of a block, and a
backward sweep takes the gradient through the blocks, last to first.
"""

from __future__ import annotations

import shutil
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from optimizer.compress.walk.activation_buffer import Buffer
from optimizer.compress.walk.blocks import BlockUse, CalibrationStream, observed
from optimizer.compress.walk.capture import Batch
from optimizer.foundation.atomic import finish
from optimizer.foundation.progress import bar
from optimizer.model.checkpoint.model import materialize, release
from optimizer.reduce.structure import outputs
from optimizer.reduce.structure.layout import ReducedCheckpoint
from optimizer.reduce.structure.states import open_stream, record_entering
from optimizer.reduce.structure.stored import stored
from optimizer.reduce.structure.structure import BlockUnits
from optimizer.reduce.structure.width import list_thinned


def measure_gradients(
    layout: ReducedCheckpoint, blocks: Sequence[str], batches: Sequence[Batch], progress: Path
) -> Mapping[str, Tensor]:
    """Return {layer that reads units: (texts, units)}. A value is the gradient, for one text, of
    the log-likelihood of an answer drawn from the model, by the mask of one unit.

    blocks: blocks whose units may be removed
    progress: folder that keeps the result for a resumed run
    """
    done = progress / "gradients"
    if not done.exists():
        partial = progress / "gradients.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _swept(layout, blocks, batches, partial)
        finish(partial, done)
    parts: list[Any] = [stored(file) for file in sorted(done.glob("*.safetensors"))]
    return ChainMap(*parts)  # read only: mappings are enough


def _swept(
    layout: ReducedCheckpoint, blocks: Sequence[str], batches: Sequence[Batch], out: Path
) -> None:
    """Compute the gradients of all units by a forward and a backward sweep over the blocks, with
    one in memory; write out/<number of its first use>.safetensors per block."""
    scratch = out.with_suffix(".states")
    stream = open_stream(layout, blocks, batches, scratch)
    states = record_entering(layout, stream, scratch)
    gradient = _behind_the_blocks(layout, stream, batches, states[-1], scratch)
    uses = [use.block for use in stream.uses[0]]
    sums: dict[str, list[Tensor]] = {}
    for use in bar(range(len(uses) - 1, -1, -1), "reduce: gradients"):
        block = uses[use]
        materialize(layout.source.model, block, layout.source.tensors)
        parts = list_thinned(layout, block)
        for i in range(len(batches)):
            gradient[i], by_mask = _through(
                layout, stream.uses[i][use], parts, states[use][i], gradient[i]
            )
            for name, texts in by_mask.items():
                rows = sums.setdefault(name, [])
                if i < len(rows):
                    rows[i] += texts  # another use of a shared block
                else:
                    rows.append(texts)
        release(layout.source.model, block)
        states[use + 1].free()
        if block not in uses[:use]:
            own = {part.down: torch.cat(sums.pop(part.down)) for part in parts}
            save_file(own, out / f"{use:04d}.safetensors")
    shutil.rmtree(scratch, ignore_errors=True)


def _behind_the_blocks(
    layout: ReducedCheckpoint,
    stream: CalibrationStream,
    batches: Sequence[Batch],
    last: Buffer,
    scratch: Path,
) -> Buffer:
    """Return the gradient of the log-likelihood by the output of the last block, one tensor per
    batch.

    last: output of the last block
    scratch: folder for gradients that exceed memory
    """
    assert isinstance(stream.hidden, Buffer)
    gradients = Buffer(stream.hidden.budget, scratch / "backward")
    assert layout.section.calibrate is not None
    generator = torch.Generator().manual_seed(layout.section.calibrate.seed)
    with outputs.open_outputs(layout, batches[0]) as model:
        for i, batch in enumerate(batches):
            parts = []
            for row in range(len(last[i])):  # logits of one text at a time
                hidden = last[i][row : row + 1].detach().requires_grad_()
                real = stream.real[i][row : row + 1]
                one = {name: t[row : row + 1] for name, t in batch.items()}
                with torch.enable_grad():
                    answers = model.answers(one, real, hidden)
                    likely = model.log_likelihood(answers, real, generator)
                parts.append(torch.autograd.grad(likely, hidden)[0])
            gradients.append(torch.cat(parts))
    return gradients


def _through(
    layout: ReducedCheckpoint,
    use: BlockUse,
    parts: Sequence[BlockUnits],
    hidden: Tensor,
    gradient: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take the gradient back through one use of a block; return (gradient by its input, {layer:
    gradients by the masks of its units, (texts, units)}).

    parts: units of the block that may be removed
    hidden: input of the use
    gradient: gradient by the output of the use
    """
    entered: dict[str, Tensor] = {}

    def kept(name: str, x: Tensor) -> None:
        entered[name] = x

    hidden = hidden.detach().requires_grad_()
    layers = {part.down: part for part in parts}
    with torch.enable_grad(), observed(layout.source.model, layers, kept):
        output = use.apply(layout.source.model, hidden)
    wanted_by = [hidden, *entered.values()]
    first, *others = torch.autograd.grad(output, wanted_by, gradient)
    by_mask = {}
    for (name, x), slope in zip(entered.items(), others, strict=True):
        product = (x.detach() * slope).reshape(
            len(hidden), -1, layers[name].count, layers[name].width
        )
        by_mask[name] = product.double().sum((1, 3))
    return first, by_mask
