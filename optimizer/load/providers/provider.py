"""Record of a kind of source: the functions that the load stage calls to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.load.weights import SourceWeights, Stored
from optimizer.recipe.schema import Model


@dataclass(frozen=True)
class Loaded:
    """Tensors and settings of a source checkpoint, as a provider read them for load."""

    files: Path  # folder of config.json, settings and tokenizer
    weights: dict[str, Stored]  # {name in the source: tensor}
    licence: str = ""  # named inside the file of weights


@dataclass(frozen=True)
class Provider:
    """A kind of source from which checkpoints are loaded, such as GGUF files.

    takes: (section, folder) -> True for a source of this kind
    read: (section, folder, transformers config, folder to write to) -> Loaded
    verify: (section, folder, weights, load folder) raises an error where the written checkpoint
        differs from the source for another reader; may add files to the load folder
    """

    name: str
    takes: Callable[[Model, Path], bool]
    read: Callable[[Model, Path, Any, Path], Loaded]
    verify: Callable[[Model, Path, SourceWeights, Path], None]
