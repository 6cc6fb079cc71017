"""Remove channels of the hidden states, the same ones in every block, embedding and head.

The weights that read or write a kept channel stay. A norm divides by the root of a mean over all
channels, which would change with their number alone; so with n of N channels its weights are
multiplied by sqrt(N / n), and removing channels that are always zero changes nothing.

Importance of a channel:

    magnitude    squared norm of all its weights
    activations  sum over the layers that read hidden states of the channel's share of
                 (mean |x_c| |W_c|)^2, where x is the layer's input and W_c the column that reads
                 the channel (Minitron, Muralidharan et al. 2024, arXiv 2407.14679, has mean |x_c|)

out/reduced.json has `hidden`, the kept channels in ascending order, and no units of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from optimizer.compress.data import calibration
from optimizer.compress.walk.blocks import observed, select_real_rows
from optimizer.compress.walk.capture import Batch
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.progress import bar, say
from optimizer.harness import tasks
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.checkpoint.model import materialize, release
from optimizer.recipe.schema import Reduction
from optimizer.reduce.structure import structure
from optimizer.reduce.structure.layout import BlockChoice, ReducedCheckpoint, open_layout
from optimizer.reduce.structure.states import apply_use, open_stream
from optimizer.reduce.structure.structure import count_values
from optimizer.reduce.structure.width import select_best
from optimizer.reduce.structure.write import write


def run(section: Reduction, source: Path, progress: Path, out: Path) -> None:
    """Write the model with fewer channels of its hidden states. Raises what the stage raises.

    source: folder of load
    progress: folder for states that exceed memory
    """
    layout = open_layout(section, source)
    count, full = find_goal(layout), width(layout)
    say(f"reduce: {count} of {full} channels of the hidden states")
    if section.reduce.measure == "magnitude":
        scores = by_magnitude(layout)
    else:
        scores = by_activations(layout, calibration.make_batches(section, source), progress)
    choices = [BlockChoice(block, {}, {}) for block in layout.blocks]
    write(layout, choices, (), out, select_best(scores, count))


def width(layout: ReducedCheckpoint) -> int:
    """Return the number of channels of the hidden states before the reduction."""
    return int(layout.config.hidden_size)


def find_goal(layout: ReducedCheckpoint) -> int:
    """Return the largest number of channels within the goal. Raises RecipeError where the
    architecture allows no other number, or even the smallest is too large."""
    family = layout.family
    if not family.hidden:
        some = ", ".join(sorted(n for n, f in FAMILIES.items() if f.hidden))
        raise RecipeError(
            f"the config of {family.model_type!r} cannot describe another hidden width: the size "
            "of a head is hidden size / heads there, or the layers that write to it are not known",
            where="reduce.methods",
            accepted=f"hidden for {some}",
            fix="Use methods: [width], or reduce.student for a narrower model.",
        )
    if not tasks.find_task(layout.section.task).generates:
        raise RecipeError(
            f"task is {layout.section.task}, and methods has hidden",
            where="reduce.methods",
            accepted=f"hidden for {', '.join(tasks.list_generating())}",
            fix="Use methods: [width].",
        )
    full, inside, outside = width(layout), [0, 0], [0, 0]
    for name in layout.shapes:
        part = inside if name.startswith(tuple(f"{b}." for b in layout.blocks)) else outside
        cut = structure.find_channel_axis(name, family, layout.prefix) is not None
        part[cut] += count_values(layout.shapes, name)
    limits = layout.section.reduce.goal
    assert limits is not None
    limit = limits.parameters or 0.0
    if limits.keep is not None:
        limit = sum(outside) + limits.keep * sum(inside)
        outside = [sum(outside), 0]  # counted in full: the goal is about the blocks
    fixed, each = inside[0] + outside[0], (inside[1] + outside[1]) / full
    fits = [n for n in _numbers(layout) if fixed + n * each <= limit]
    if not fits:
        least = fixed + min(_numbers(layout)) * each
        raise RecipeError(
            f"with {min(_numbers(layout))} channels the model has {least:,.0f} parameters",
            where="reduce.goal",
            accepted="a goal that this number meets",
            fix="Keep more.",
        )
    return max(fits)


def _numbers(layout: ReducedCheckpoint) -> list[int]:
    """List the numbers of channels of the hidden states that config.json can describe."""
    full, attention = width(layout), layout.family.attention
    numbers = structure.list_multiples(full, layout.section.reduce.multiple_of)
    divided = attention is not None and attention.divides == layout.family.hidden
    heads = layout.config.num_attention_heads if divided else 1
    return [n for n in numbers if n % heads == 0]


def by_magnitude(layout: ReducedCheckpoint) -> Tensor:
    """Compute the importance of each channel of the hidden states, (channels,): the sum of squares
    of all its weights."""
    scores = torch.zeros(width(layout), dtype=torch.float64)
    for name in layout.shapes:
        axis = structure.find_channel_axis(name, layout.family, layout.prefix)
        if axis is not None:
            squares = layout.checkpoint.tensors[name].double().square()
            scores += squares.movedim(axis, 0).reshape(len(scores), -1).sum(1)
    return scores


@torch.no_grad()
def by_activations(layout: ReducedCheckpoint, batches: Sequence[Batch], progress: Path) -> Tensor:
    """Return the importance of each channel by activations, (channels,), with the module's formula.
    The head counts as a layer that reads the output of the last norm."""
    family, model, tensors = layout.family, layout.source.model, layout.source.tensors
    stream = open_stream(layout, layout.blocks, batches, progress)
    scores = torch.zeros(width(layout), dtype=torch.float64)
    readers = [n for n in family.linears if n not in family.writes]
    for use in bar(range(len(stream.uses[0])), "reduce"):
        block = stream.uses[0][use].block
        materialize(model, block, tensors)
        sums = {f"{block}.{n}": torch.zeros_like(scores) for n in readers}
        for i, hidden in enumerate(stream.hidden):
            real = stream.real[i]

            def look(name: str, x: Tensor, real: Tensor = real) -> None:
                sums[name] += select_real_rows(x, real).double().abs().sum(0)  # noqa: B023

            with observed(model, tuple(sums), look):
                stream.hidden[i] = apply_use(layout, stream, stream.uses[i][use], hidden)
        for name, absolute in sums.items():
            scores += _shares(absolute, model.get_submodule(name).get_parameter("weight"))
        release(model, block)
    norm = f"{layout.prefix}{family.final_norm}"
    materialize(model, norm, tensors)
    absolute = torch.zeros_like(scores)
    for hidden, real in zip(stream.hidden, stream.real, strict=True):
        rows = model.get_submodule(norm)(select_real_rows(hidden, real).float())
        absolute += rows.double().abs().sum(0)
    release(model, norm)
    head = f"{family.head}.weight"
    tied = f"{layout.prefix}{family.embeddings}.weight"
    return scores + _shares(absolute, layout.checkpoint.tensors[head if head in tensors else tied])


def _shares(absolute: Tensor, weight: Tensor) -> Tensor:
    """Return the share of each hidden channel in a layer's output, by squares, (in,); they sum to
    1.

    absolute: sums of |input| (in,)
    weight: (out, in)
    """
    added = (absolute * weight.double().norm(dim=0)).square()
    shares: Tensor = added / added.sum()
    return shares
