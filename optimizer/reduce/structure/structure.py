"""Removable parts of a checkpoint: its blocks, and in each block its neurons and heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from optimizer.foundation.errors import RecipeError
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.architectures.family_record import Family
from optimizer.recipe.reduce import Reduce

Kind = Literal["ffn", "heads"]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class UnitRows:
    """Rows of a linear layer that compute removable units. The rows consist of `parts` equal
    slices, and each unit has `each` adjacent rows in every slice."""

    linear: str
    each: int = 1
    parts: int = 1

    def of(self, units: Tensor, count: int) -> Tensor:
        """Return the row indices of these removable units, slice by slice.

        count: number of all units
        """
        rows = spread_units(units, self.each)
        return torch.cat([rows + part * count * self.each for part in range(self.parts)])


@dataclass(frozen=True)
class BlockUnits:
    """Removable units of one kind in one block: neurons, or key/value heads with their query heads.
    Names are the checkpoint's.

    count: number of units
    rows: linear layers that compute the units
    down: linear layer that reads the units
    width: columns of `down` per unit
    """

    kind: Kind
    count: int
    rows: tuple[UnitRows, ...]
    down: str
    width: int

    def columns(self, units: Tensor) -> Tensor:
        """Return the indices of the columns of `down` that read these removable units."""
        return spread_units(units, self.width)

    def weights(self, shapes: Shapes) -> int:
        """Count the weights and biases that one unit of the block has."""
        rows = [
            count_values(shapes, f"{r.linear}.{p}") for r in self.rows for p in ("weight", "bias")
        ]
        return (sum(rows) + count_values(shapes, f"{self.down}.weight")) // self.count


def spread_units(units: Tensor, each: int) -> Tensor:
    """Return the indices of the rows (or columns) of a weight that belong to the given units.

    units: numbers of the units
    each: adjacent rows of one unit
    """
    return (units[:, None] * each + torch.arange(each)).reshape(-1)


def list_multiples(full: int, multiple_of: int) -> tuple[int, ...]:
    """Return the numbers of units that may be kept, ascending: the multiples of `multiple_of` up to
    `full`, and `full`."""
    return tuple(sorted({*range(multiple_of, full + 1, multiple_of), full}))


def count_values(shapes: Shapes, name: str) -> int:
    """Return the number of values of the tensor `name` of the model that is reduced; 0 where
    `shapes` lacks it."""
    return int(torch.Size(shapes[name]).numel()) if name in shapes else 0


def list_parts(
    block: str, family: Family, head_size: int, shapes: Shapes
) -> tuple[BlockUnits, ...]:
    """Return the removable parts of a block, in the order of computation."""
    parts: list[BlockUnits] = []
    if (heads := family.attention) is not None:
        groups = shapes[f"{block}.{heads.key}.weight"][0] // head_size
        each = shapes[f"{block}.{heads.query}.weight"][0] // groups
        rows = (
            UnitRows(f"{block}.{heads.query}", each),
            UnitRows(f"{block}.{heads.key}", head_size),
            UnitRows(f"{block}.{heads.value}", head_size),
        )
        parts.append(BlockUnits("heads", groups, rows, f"{block}.{heads.output}", each))
    if (ffn := family.feed_forward) is not None:
        count = shapes[f"{block}.{ffn.down}.weight"][1]
        up = tuple(UnitRows(f"{block}.{name}", parts=ffn.parts) for name in ffn.up)
        parts.append(BlockUnits("ffn", count, up, f"{block}.{ffn.down}", 1))
    return tuple(parts)


def find_channel_axis(name: str, family: Family, prefix: str) -> int | None:
    """Return the axis of a tensor along which hidden channels are removed; None without such an
    axis. Linear weights lie as (out, in).

    prefix: prefix of the base model's names
    """
    start, (module, _, parameter) = f"{prefix}{family.blocks}.", name.rpartition(".")
    if not name.startswith(start):
        return {
            f"{prefix}{family.embeddings}": 1,
            family.head: 1,
            f"{prefix}{family.final_norm}": 0,
        }.get(module)
    inner = module.removeprefix(start).partition(".")[2]
    if inner in family.writes:
        return 0
    if inner in family.linears:
        return 1 if parameter == "weight" else None
    return 0 if inner in family.norms else None


def get_head_size(config: Any) -> int:
    """Return the size of a removable attention head that a config states or implies."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def list_kinds(section: Reduce, family: Family) -> tuple[Kind, ...]:
    """Return the kinds of units that the recipe's methods remove. Raises RecipeError for a method
    that the architecture does not allow."""
    rows = ", ".join(sorted(n for n, f in FAMILIES.items() if f.feed_forward is not None))
    if {"width", "ffn"} & {*section.chosen} and family.feed_forward is None:
        raise RecipeError(
            f"the layers with the neurons of {family.model_type!r} are not known",
            where="reduce.methods",
            accepted=f"model types {rows}",
            fix="Add feed_forward to its row in optimizer/model/architectures/families.py.",
        )
    if "heads" in section.chosen and family.attention is None:
        some = ", ".join(sorted(n for n, f in FAMILIES.items() if f.attention is not None))
        raise RecipeError(
            f"the config of {family.model_type!r} cannot describe fewer heads: the size of a head "
            "is hidden size / heads there, so every head would change",
            where="reduce.methods",
            accepted=f"heads of {some}; ffn and depth of this one",
            fix="Use methods: [ffn].",
        )
    if "depth" in section.chosen and not family.depth:
        raise RecipeError(
            f"blocks of {family.model_type!r} cannot be removed: they share their weights, or the "
            "first one differs from the others",
            where="reduce.methods",
            accepted="ffn",
            fix="Use methods: [ffn].",
        )
    chosen: list[Kind] = []
    if {"width", "heads"} & {*section.chosen} and family.attention is not None:
        chosen.append("heads")
    if {"width", "ffn"} & {*section.chosen}:
        chosen.append("ffn")
    return tuple(chosen)
