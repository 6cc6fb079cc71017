"""A folder of float weights as transformers saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimizer.load import faithful, weights
from optimizer.load.providers.provider import Loaded, Provider
from optimizer.load.weights import Weights
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.recipe.schema import Model


def takes(section: Model, folder: Path) -> bool:
    """Everything that is left."""
    del section, folder
    return True


def read(section: Model, folder: Path, config: Any, scratch: Path) -> Loaded:
    """Raises CheckpointError as weights.find."""
    del config, scratch
    return Loaded(folder, weights.find(folder, section))


def verify(section: Model, folder: Path, chosen: Weights, out: Path) -> None:
    """Raises OptimizeError naming the first parameter that differs."""
    faithful.check(folder, section, open_checkpoint(out).tensors.as_written, chosen)


TRANSFORMERS = Provider("transformers", takes, read, verify)
