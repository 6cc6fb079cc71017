"""Choose the neurons and heads that stay in every block, block by block.

By weights alone the blocks are independent. Otherwise two streams of hidden states go through them:
the float model's, and that of the model whose earlier blocks were thinned. Units are chosen on the
inputs that a block has in the smaller model, and weights are adjusted to the outputs that its
layers have in the float model.

While it runs, `progress`/<segment>/ holds the choices, and the newest also both streams, so a
killed run resumes bit-identically.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from optimizer.compress.walk.blocks import (
    BlockGroup,
    CalibrationStream,
    advance,
    advance_float_reference,
    observed,
    select_real_rows,
    split_segments,
)
from optimizer.compress.walk.capture import Batch
from optimizer.foundation import safetensors_stream
from optimizer.foundation.atomic import finish
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process import freed_memory
from optimizer.foundation.progress import bar, say
from optimizer.model.checkpoint.model import materialize, release
from optimizer.reduce.methods import activations, fisher, least_squares, magnitude, second_order
from optimizer.reduce.structure.layout import BlockChoice, ReducedCheckpoint
from optimizer.reduce.structure.moments import Moments
from optimizer.reduce.structure.states import open_stream
from optimizer.reduce.structure.stored import StoredTensors, stored
from optimizer.reduce.structure.structure import BlockUnits, Kind

STREAM, CHOICE = "stream.safetensors", "choice.safetensors"
Gradients = Mapping[str, Tensor]
"""{layer that reads the units: gradients (texts, units)}: see gradients.py."""


def choose(
    layout: ReducedCheckpoint,
    blocks: Sequence[str],
    batches: Sequence[Batch],
    gradients: Gradients,
    progress: Path,
) -> list[BlockChoice]:
    """Choose the units of each of `blocks`, the blocks that stay.

    gradients: gradients by the masks of units (gradients.py), for importance: fisher
    progress: folder that keeps the choices for a resumed run
    """
    if not list_thinned(layout, blocks[0]):
        return [BlockChoice(block, {}, {}) for block in blocks]
    if layout.section.reduce.importance == "magnitude":
        return [_by_weights(layout, block) for block in blocks]
    stream = open_stream(layout, blocks, batches, progress, reference=True)
    groups = split_segments(stream.uses[0])
    folders = [progress / f"{i:04d}" for i in range(len(groups))]
    first = sum(folder.exists() for folder in folders)
    if first:
        say(f"reduce: resuming after {first} of {len(groups)} blocks")
        if first < len(groups):
            _load_stream(folders[first - 1], stream)
    for i in bar(range(first, len(groups)), "reduce"):
        last = i + 1 == len(groups)
        walk = _SegmentChoice(layout, stream, groups[i], gradients)
        _keep(folders[i], walk.chosen(), None if last else stream)
        if i:
            (folders[i - 1] / STREAM).unlink(missing_ok=True)
        freed_memory.give_back()
    return [choice for folder in folders for choice in _read(folder)]


def list_thinned(layout: ReducedCheckpoint, block: str) -> list[BlockUnits]:
    """List the parts of a block (neurons, heads) that lose units."""
    return [p for p in layout.parts(block) if keep(layout, p.kind) < p.count]


def keep(layout: ReducedCheckpoint, kind: Kind) -> int:
    """Return the number of units of a kind ("ffn" or "heads") that stay in each block of the
    smaller model."""
    return layout.goal.ffn if kind == "ffn" else layout.goal.heads


def _by_weights(layout: ReducedCheckpoint, block: str) -> BlockChoice:
    units: dict[Kind, Tensor] = {}
    for part in list_thinned(layout, block):
        scores = by_magnitude(layout, part)
        units[part.kind] = select_best(scores, keep(layout, part.kind))
    return BlockChoice(block, units, {})


def by_magnitude(layout: ReducedCheckpoint, part: BlockUnits) -> Tensor:
    """Compute the importance of each unit of `part` from its weights alone, (units,)."""
    tensors = layout.checkpoint.tensors
    rows = [w for r in part.rows for w in tensors[f"{r.linear}.weight"].chunk(r.parts)]
    return magnitude.measure_importance(rows, tensors[f"{part.down}.weight"], part.count)


def select_best(scores: Tensor, count: int) -> Tensor:
    """Return the units to keep, those with the highest scores, ascending; of equal scores the
    first."""
    order = scores.argsort(descending=True, stable=True)
    return order[:count].sort().values


@dataclass
class _SegmentChoice:
    """Choice of units in one segment of blocks, whose weights are in memory meanwhile.

    thin: {weight or bias of a layer that reads units: its values, zero for the removed units}
    """

    layout: ReducedCheckpoint
    stream: CalibrationStream
    segment: range
    gradients: Gradients
    thin: dict[str, Tensor] = field(default_factory=dict)

    @property
    def group(self) -> BlockGroup:
        names = dict.fromkeys(self.stream.uses[0][use].block for use in self.segment)
        model, known = self.layout.source.model, self.layout.family
        return BlockGroup(model, known, self.stream, self.segment, tuple(names), {})

    def chosen(self) -> list[BlockChoice]:
        """Choose the units of each block, and run both streams of hidden states through the
        segment."""
        group, source = self.group, self.layout.source
        for block in group.blocks:
            materialize(source.model, block, source.tensors)
        choices = [self._block(group, block) for block in group.blocks]
        advance_float_reference(group)
        with self._thinned():
            advance(group)
        for block in group.blocks:
            release(source.model, block)
        return choices

    def _block(self, group: BlockGroup, block: str) -> BlockChoice:
        units: dict[Kind, Tensor] = {}
        changed: dict[str, Tensor] = {}
        for part in list_thinned(self.layout, block):
            layer = group.linear(part.down)
            units[part.kind], new = self._choice(part, layer, self._moments(group, part))
            for name, values in new.items():
                if not bool(torch.isfinite(values).all()):
                    raise CheckpointError("adjusted values are NaN or infinite", where=name)
                changed[name] = values.to(self.layout.checkpoint.tensors.entry(name).dtype)
                self.thin[name] = changed[name].float()
            name, columns = f"{part.down}.weight", part.columns(units[part.kind])
            kept = self.thin.get(name, layer.weight[:, columns])
            self.thin[name] = torch.zeros_like(layer.weight)
            self.thin[name][:, columns] = kept
        return BlockChoice(block, units, changed)

    def _moments(self, group: BlockGroup, part: BlockUnits) -> Moments:
        adjusts = self.layout.section.reduce.importance != "activations"
        sums = Moments.empty(part.count * part.width, products=adjusts)
        for i in range(len(self.stream.hidden)):
            reference = self.stream.float_reference
            assert reference is not None
            floats = self._inputs(group, part, i, reference[i]) if adjusts else []
            with self._thinned():
                inputs = self._inputs(group, part, i, self.stream.hidden[i])
            with self.stream.sums():
                for use, x in enumerate(inputs):
                    sums.add(x, floats[use] if adjusts else None)
        return sums

    def _inputs(
        self, group: BlockGroup, part: BlockUnits, batch: int, hidden: Tensor
    ) -> list[Tensor]:
        """Return the inputs (tokens, in) of the layer that reads the part's units, once per use of
        the block."""
        inputs: list[Tensor] = []
        real = self.stream.real[batch]
        with (
            observed(
                group.model,
                (part.down,),
                lambda _, x: inputs.append(select_real_rows(x, real).float()),
            ),
            torch.no_grad(),
            self.stream.products,
        ):
            group.output(batch, hidden)
        return inputs

    def _choice(
        self, part: BlockUnits, layer: nn.Linear, sums: Moments
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (units that stay, {parameter of `layer`: adjusted values}), where `layer` reads
        the units. A bias corrects the mean output, so weights with a bias are fitted to centered
        moments."""
        count, importance = keep(self.layout, part.kind), self.layout.section.reduce.importance
        weight, bias = layer.weight.detach(), layer.bias
        if importance == "activations":
            mean = sums.absolute / sums.tokens
            return select_best(activations.measure_importance(mean, weight, part.count), count), {}
        try:
            hessian, cross = sums.products(centered=bias is not None)
            if importance == "fisher":
                units = fisher.choose(self.gradients[part.down], count)
                columns = part.columns(units)
                new = least_squares.solve_factors(weight, hessian, cross, columns)
            else:
                units = second_order.choose(weight, hessian, cross, part.count, count)
                columns = part.columns(units)
                new = least_squares.solve_weights(weight, hessian, cross, columns)
        except (ValueError, RuntimeError) as e:  # torch's error for a singular matrix
            raise CheckpointError(str(e), where=part.down) from e
        changed = {f"{part.down}.weight": new}
        if bias is not None:
            changed[f"{part.down}.bias"] = sums.bias(bias, weight, new, columns)
        return units, changed

    @contextmanager
    def _thinned(self) -> Iterator[None]:
        parameters = {n: self.layout.source.model.get_parameter(n) for n in self.thin}
        before = {name: parameter.data for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.data = self.thin[name]
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = before[name]


def _keep(folder: Path, choices: Sequence[BlockChoice], stream: CalibrationStream | None) -> None:
    """Write the chosen units of a segment atomically, with the hidden states that the next block
    starts from, for a run that is resumed."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    entries: dict[str, Tensor] = {}
    for choice in choices:
        entries |= {f"{choice.block}|{kind}": ids for kind, ids in choice.units.items()}
        entries |= {f"{choice.block}|{name}": t for name, t in choice.adjusted.items()}
    safetensors_stream.write(entries.items(), partial / CHOICE)
    if stream is not None:
        assert stream.float_reference is not None
        both = {"hidden": stream.hidden, "reference": stream.float_reference}
        safetensors_stream.write(
            (
                (f"{which}.{i:06d}", t)
                for which, states in both.items()
                for i, t in enumerate(states)
            ),
            partial / STREAM,
        )
    finish(partial, folder)


def _read(folder: Path) -> list[BlockChoice]:
    """Read the units that reduce chose in a segment; adjusted tensors stay in their file."""
    file = stored(folder / CHOICE)
    split = [key.partition("|") for key in file]
    choices = []
    for block in dict.fromkeys(block for block, _, _ in split):
        names = [name for of, _, name in split if of == block]
        units = {
            cast(Kind, kind): file[f"{block}|{kind}"] for kind in names if kind in ("ffn", "heads")
        }
        adjusted = StoredTensors(file.file, tuple(n for n in names if n not in units), f"{block}|")
        choices.append(BlockChoice(block, units, adjusted))
    return choices


def _load_stream(folder: Path, stream: CalibrationStream) -> None:
    reference: Any = stream.float_reference
    with safe_open(folder / STREAM, "pt") as f:
        for i in range(len(stream.hidden)):
            stream.hidden[i] = f.get_tensor(f"hidden.{i:06d}").clone()
            reference[i] = f.get_tensor(f"reference.{i:06d}").clone()
