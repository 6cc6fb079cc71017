"""What a kind of source gives to the load stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.load.weights import Stored, Weights
from optimizer.recipe.schema import Model


@dataclass(frozen=True)
class Loaded:
    """files: the folder of everything but the weights: config.json, settings, tokenizer. weights:
    {name in the source: entry}. licence: the one that the weights' own file names, or ""."""

    files: Path
    weights: dict[str, Stored]
    licence: str = ""


@dataclass(frozen=True)
class Provider:
    """A kind of source.

    takes: (section, folder) -> whether it reads this one. read: (section, folder, transformers
    config, a folder to write to) -> Loaded. verify: (section, folder, the weights taken, the load
    folder): whether what was written is the user's model, by another reader; may finish the folder.
    """

    name: str
    takes: Callable[[Model, Path], bool]
    read: Callable[[Model, Path, Any, Path], Loaded]
    verify: Callable[[Model, Path, Weights, Path], None]
