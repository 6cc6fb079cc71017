"""Open a checkpoint to reduce it: its blocks, their parts, and the sizes that may be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from optimizer.compress.walk.model_source import ModelSource, open_source
from optimizer.model.architectures.family_record import Family
from optimizer.model.checkpoint.checkpoint import Checkpoint, open_checkpoint
from optimizer.recipe.schema import Reduction
from optimizer.reduce.structure import sizes, structure
from optimizer.reduce.structure.sizes import Sizes
from optimizer.reduce.structure.structure import BlockUnits, Kind


@dataclass(frozen=True)
class BlockChoice:
    """Units that one block keeps, where the block stays.

    units: {kind: kept units, ascending}
    adjusted: {weight name: values (out, in) on the kept inputs, where a method changed them}
    """

    block: str
    units: Mapping[Kind, Tensor]
    adjusted: Mapping[str, Tensor]


@dataclass(frozen=True)
class ReducedCheckpoint:
    """A checkpoint in the layout of load, and the section of the recipe that reduces it.

    folder: folder of the checkpoint
    chosen: sizes to make, where they follow from times (latency_table.py)
    """

    folder: Path
    section: Reduction
    checkpoint: Checkpoint
    source: ModelSource
    chosen: Sizes | None = None

    @property
    def family(self) -> Family:
        return self.source.family

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{tensor of the checkpoint: shape}, with linear weights as (out, in)."""
        return {name: self.checkpoint.shape(name) for name in self.checkpoint.tensors}

    @property
    def config(self) -> Any:
        model: Any = self.source.model
        return model.config

    @property
    def blocks(self) -> tuple[str, ...]:
        return self.source.blocks

    @property
    def prefix(self) -> str:
        return self.family.prefix(self.section.task)

    @cached_property
    def head_size(self) -> int:
        """Size of an attention head."""
        return structure.get_head_size(self.config)

    def parts(self, block: str) -> tuple[BlockUnits, ...]:
        """Return the removable parts of a block."""
        return structure.list_parts(block, self.family, self.head_size, self.shapes)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of units that the recipe's methods remove. Raises RecipeError for a method that the
        architecture does not allow."""
        return structure.list_kinds(self.section.reduce, self.family)

    @cached_property
    def model(self) -> sizes.SizeChoices:
        """Sizes of the model, and the numbers that may be chosen."""
        first = {p.kind: p for p in self.parts(self.blocks[0])}
        ffn, heads = first.get("ffn"), first.get("heads")
        own = dict.fromkeys(self.blocks, 0)
        for name in self.shapes:
            block = next((b for b in self.blocks if name.startswith(f"{b}.")), None)
            if block is not None:
                own[block] += structure.count_values(self.shapes, name)
        total = sum(structure.count_values(self.shapes, name) for name in self.shapes)
        full = Sizes(len(self.blocks), ffn.count if ffn else 0, heads.count if heads else 0)
        each = {kind: part.weights(self.shapes) for kind, part in first.items()}
        some = self.section.reduce
        widths = structure.list_multiples(full.ffn, some.multiple_of)
        return sizes.SizeChoices(
            full=full,
            each_ffn=each.get("ffn", 0),
            each_heads=each.get("heads", 0),
            fixed=own[self.blocks[0]]
            - full.ffn * each.get("ffn", 0)
            - full.heads * each.get("heads", 0),
            outside=total - sum(own.values()),
            blocks=range(1, full.blocks + 1) if "depth" in some.chosen else (full.blocks,),
            ffn=widths if "ffn" in self.kinds else (full.ffn,),
            heads=self._groups(heads) if heads and "heads" in self.kinds else (full.heads,),
        )

    @cached_property
    def goal(self) -> Sizes:
        """Sizes of the smaller model that meet the recipe's goal. Raises RecipeError where none
        do."""
        if self.chosen is not None:
            return self.chosen
        goal = self.section.reduce.goal
        assert goal is not None
        return sizes.solve(goal, self.model)

    def _groups(self, heads: BlockUnits) -> tuple[int, ...]:
        """List the numbers of key/value heads that config.json can describe."""
        known = self.family.attention
        assert known is not None
        divided = getattr(self.config, known.divides) if known.divides else 0
        each = heads.width // self.head_size
        return tuple(n for n in range(1, heads.count + 1) if divided % (n * each) == 0)


def open_layout(section: Reduction, folder: Path) -> ReducedCheckpoint:
    """Open a checkpoint that stage load wrote, to be made smaller. Raises CheckpointError for
    another folder."""
    source = open_source(section.task, folder)
    return ReducedCheckpoint(folder, section, open_checkpoint(folder), source)
