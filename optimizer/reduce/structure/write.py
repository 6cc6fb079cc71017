"""Write the smaller checkpoint in the layout of load, tensor by tensor.

out/checkpoint/     load's files, with the smaller config.json and model.safetensors
out/contract.json   as the reference's; of a decoder with the smaller model's KV cache
out/source.json     as the reference's, with the new number of `parameters`
out/reduced.json    the choices:
    version 1; goal, methods, importance, depth_importance, precision (compress.precision) as in the
    recipe
    sizes       {"blocks" | "ffn" | "heads": [before, after]} per block; "hidden", where channels
                were removed
    hidden      [kept channels of the hidden states], where some were removed
    weights     {"blocks" | "all": [before, after]}
    layers      one per block of the smaller model, in order: {block, of (its name in the
                reference), ffn: [kept neurons], heads: [kept key/value heads],
                adjusted: [weights whose values the method changed]}; without the kinds of which
                all are kept
    left_out    [{block, value}] the removed blocks, in the order of choice; value: see
                depth.LeftOut
    compared    [{sizes, distance}] where several sizes were fast enough: see nearest.py
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation import safetensors_stream
from optimizer.foundation.errors import CheckpointError
from optimizer.model.checkpoint.checkpoint import open_checkpoint, read_json
from optimizer.model.checkpoint.model import build_skeleton, list_parameter_shapes
from optimizer.reduce.structure.depth import RemovedBlock
from optimizer.reduce.structure.layout import BlockChoice, ReducedCheckpoint
from optimizer.reduce.structure.sizes import Sizes
from optimizer.reduce.structure.structure import find_channel_axis

VERSION = 1
REDUCED = "reduced.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class _Cut:
    """Rows and columns that one tensor of the smaller model takes from the reference.

    origin: the tensor's name in the reference
    rows, columns: kept rows and columns; None: all
    norm: True for a weight of a norm that loses channels
    """

    origin: str
    rows: Tensor | None = None
    columns: Tensor | None = None
    norm: bool = False


@dataclass(frozen=True)
class Smaller:
    """The smaller model, cut from the reference.

    layout: layout of the reference
    choices: kept blocks, in order
    left_out: removed blocks
    channels: kept channels of the hidden states, where blocks keep their units; None: all
    """

    layout: ReducedCheckpoint
    choices: Sequence[BlockChoice]
    left_out: Sequence[RemovedBlock]
    channels: Tensor | None = None

    @cached_property
    def cuts(self) -> dict[str, _Cut]:
        """{tensor of the smaller model: rows and columns that it takes from the reference}."""
        layout = self.layout
        inside = tuple(f"{b}." for b in layout.blocks)
        cuts = {n: _Cut(n) for n in layout.shapes if not n.startswith(inside)}
        for new, choice in zip(layout.blocks, self.choices, strict=False):
            old = choice.block
            of_block = {n: _Cut(n) for n in layout.shapes if n.startswith(f"{old}.")}
            of_block |= self._parts(choice)
            cuts |= {f"{new}{name.removeprefix(old)}": cut for name, cut in of_block.items()}
        return cuts if self.channels is None else {n: self._narrow(n) for n in cuts}

    def _narrow(self, name: str) -> _Cut:
        """Return which rows and columns a tensor keeps in a model that loses only channels of its
        hidden states."""
        axis = find_channel_axis(name, self.layout.family, self.layout.prefix)
        if axis is None:
            return _Cut(name)
        if axis == 1:
            return _Cut(name, None, self.channels)
        return _Cut(
            name,
            self.channels,
            None,
            len(self.layout.shapes[name]) == 1 and name.endswith(".weight"),
        )

    def _parts(self, choice: BlockChoice) -> dict[str, _Cut]:
        cuts = {}
        for part in self.layout.parts(choice.block):
            units = choice.units.get(part.kind)
            if units is None:
                continue
            for linear in part.rows:
                rows = linear.of(units, part.count)
                for name in (f"{linear.linear}.weight", f"{linear.linear}.bias"):
                    if name in self.layout.shapes:
                        cuts[name] = _Cut(name, rows)
            name = f"{part.down}.weight"
            cuts[name] = _Cut(name, None, part.columns(units))
        return cuts

    @cached_property
    def adjusted(self) -> dict[str, BlockChoice]:
        """{name in the reference of a weight whose values a method changed: choice that contains
        the values}."""
        return {name: choice for choice in self.choices for name in choice.adjusted}

    def value(self, name: str) -> Tensor:
        """Return the values of one tensor of the smaller model, as stored."""
        cut, tensors = self.cuts[name], self.layout.checkpoint.tensors
        stored = tensors.stored(cut.origin)
        if cut.origin in self.adjusted:
            value = self.adjusted[cut.origin].adjusted[cut.origin].to(stored.dtype)
        else:
            value = tensors.as_stored(cut.origin, stored)
            value = value if cut.rows is None else value[cut.rows]
            value = value if cut.columns is None else value[:, cut.columns]
            if cut.norm:
                value = (value.double() * math.sqrt(len(stored) / len(value))).to(value.dtype)
        return tensors.as_stored(cut.origin, value).contiguous()

    @cached_property
    def specs(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return {name: (dtype, shape)} of the smaller model's tensors, as stored."""
        return {name: self._spec(cut) for name, cut in self.cuts.items()}

    def _spec(self, cut: _Cut) -> tuple[torch.dtype, tuple[int, ...]]:
        tensors = self.layout.checkpoint.tensors
        shape = list(tensors.shape(cut.origin))
        if cut.rows is not None:
            shape[0] = len(cut.rows)
        if cut.columns is not None:
            shape[1] = len(cut.columns)
        stored = tensors.as_stored(cut.origin, torch.empty(shape, device="meta")).shape
        return tensors.entry(cut.origin).dtype, tuple(stored)

    def parameters(self, inside: bool = False) -> int:
        """Return the number of parameters of the smaller model.

        inside: True to count only those of its blocks
        """
        start = tuple(f"{b}." for b in self.layout.blocks) if inside else ""
        shapes = [shape for name, (_, shape) in self.specs.items() if name.startswith(start)]
        return sum(math.prod(shape) for shape in shapes)

    @property
    def sizes(self) -> Sizes:
        """Sizes of the smaller model."""
        full, first = self.layout.model.full, self.choices[0].units
        ffn, heads = first.get("ffn"), first.get("heads")
        return Sizes(
            len(self.choices),
            full.ffn if ffn is None else len(ffn),
            full.heads if heads is None else len(heads),
        )


def write(
    layout: ReducedCheckpoint,
    choices: Sequence[BlockChoice],
    left_out: Sequence[RemovedBlock],
    out: Path,
    channels: Tensor | None = None,
    compared: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the smaller model. Raises CheckpointError where transformers builds other shapes from
    its config.

    channels: see Smaller
    compared: entries of reduced.json
    """
    smaller = Smaller(layout, choices, left_out, channels)
    folder = out / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in sorted(layout.checkpoint.folder.iterdir()):
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    write_document(folder / "config.json", build_smaller_config(smaller))
    safetensors_stream.write_known(smaller.specs, smaller.value, folder / WEIGHTS)
    _check_built(layout, out)
    contract = read_json(layout.folder / "contract.json")
    if contract.get("generation") is not None:
        contract["generation"]["layers"] = smaller.sizes.blocks
        if smaller.sizes.heads:
            contract["generation"]["kv_heads"] = smaller.sizes.heads
    write_document(out / "contract.json", contract)
    origin = read_json(layout.folder / "source.json")
    write_document(out / "source.json", {**origin, "parameters": smaller.parameters()})
    write_document(out / REDUCED, {**document(smaller), "compared": [*compared]})


def build_smaller_config(smaller: Smaller) -> dict[str, Any]:
    """Return the content of the smaller model's config.json."""
    layout, family, kept = smaller.layout, smaller.layout.family, smaller.sizes
    config = dict(layout.checkpoint.config)
    if kept.blocks != layout.model.full.blocks:
        config[family.depth] = kept.blocks
        places = [layout.blocks.index(c.block) for c in smaller.choices]
        for name in family.per_block:
            values = getattr(layout.config, name, None)
            if values is not None:
                config[name] = [values[i] for i in places]
    if kept.ffn != layout.model.full.ffn and family.feed_forward is not None:
        config[family.feed_forward.width] = kept.ffn
    if kept.heads != layout.model.full.heads and family.attention is not None:
        each = layout.config.num_attention_heads // layout.model.full.heads
        config[family.attention.groups] = kept.heads
        config[family.attention.heads] = kept.heads * each
        config[family.attention.size] = layout.head_size
    if smaller.channels is not None:
        assert family.attention is not None
        config[family.hidden] = len(smaller.channels)
        config[family.attention.size] = layout.head_size
    return config


def document(smaller: Smaller) -> dict[str, Any]:
    """Return the content of reduced.json."""
    layout, section = smaller.layout, smaller.layout.section.reduce
    full, kept = layout.model.full, smaller.sizes
    layers = []
    for new, choice in zip(layout.blocks, smaller.choices, strict=False):
        layer: dict[str, Any] = {"block": new, "of": choice.block}
        layer |= {kind: ids.tolist() for kind, ids in choice.units.items()}
        layers.append({**layer, "adjusted": sorted(choice.adjusted)})
    chosen = section.model_dump(mode="json", include={"goal", "depth_importance"})
    hidden, width = {}, {}
    if smaller.channels is not None:
        hidden = {"hidden": smaller.channels.tolist()}
        width = {"hidden": [layout.config.hidden_size, len(smaller.channels)]}
    return {
        "version": VERSION,
        **chosen,
        "importance": section.measure,
        **hidden,
        "methods": list(section.chosen),
        "precision": layout.section.compress.decided,
        "sizes": {
            "blocks": [full.blocks, kept.blocks],
            "ffn": [full.ffn, kept.ffn],
            "heads": [full.heads, kept.heads],
            **width,
        },
        "weights": {
            "blocks": [layout.model.in_blocks(full), smaller.parameters(inside=True)],
            "all": [layout.model.parameters(full), smaller.parameters()],
        },
        "layers": layers,
        "left_out": [{"block": gone.block, "value": gone.value} for gone in smaller.left_out],
    }


def _check_built(layout: ReducedCheckpoint, out: Path) -> None:
    """Check that transformers builds from the config the stored tensors, by name and shape."""
    written = open_checkpoint(out)
    expected = list_parameter_shapes(build_skeleton(written, layout.section.task))
    present = {name: written.shape(name) for name in written.tensors}
    for name in sorted({*expected, *present}):
        if expected.get(name) != present.get(name):
            raise CheckpointError(
                f"by the smaller config {name} has shape {expected.get(name)}, and the cut tensor "
                f"{present.get(name)}",
                where=f"{layout.checkpoint.folder / 'config.json'}: {layout.family.model_type}",
                fix="This model differs from others of its type: remove reduce, or use other "
                "reduce.methods.",
            )


def write_document(file: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON document atomically."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.rename(file)
