"""Stage folders made on the way to an exported graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from optimizer.export import names
from optimizer.export import stage as export
from optimizer.foundation import state as compressed_state
from optimizer.foundation.state import CompressedState
from optimizer.load import stage as load
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.recipe.schema import Export, Model, Task


@dataclass(frozen=True)
class Exported:
    """A load folder and the graph folder made from it."""

    source: Path
    graph: Path

    @property
    def names(self) -> names.GraphNames:
        return names.from_dict(json.loads((self.graph / "names.json").read_text()))

    @property
    def tensors(self) -> Mapping[str, object]:
        return open_checkpoint(self.source).tensors


def loaded(model: Path, out: Path, task: Task = "sentence-embedding") -> Path:
    out.mkdir(parents=True)
    load.run(Model(source=str(model), task=task), out=out)
    return out


def loaded_decoder(model: Path, out: Path) -> Path:
    """The load folder of a causal language model."""
    return loaded(model, out, task="text-generation")


def stated(state: CompressedState, out: Path) -> Path:
    out.mkdir(parents=True)
    compressed_state.write(state, out)
    return out


def exported(
    source: Path,
    out: Path,
    state: CompressedState | None = None,
    precision: Literal["fp32", "fp16"] = "fp32",
) -> Exported:
    """The graph of a load folder, by the stage itself, so its checks have passed."""
    folder = stated(state or CompressedState({}), out.with_name(out.name + ".state"))
    out.mkdir(parents=True)
    export.run(Export(float=precision), source, folder, out=out)
    return Exported(source, out)
