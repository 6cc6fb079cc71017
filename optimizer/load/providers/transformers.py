"""Read a folder of float weights as transformers saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.load import conversions, faithful, weights
from optimizer.load.config.model_type import complete_config
from optimizer.load.providers.provider import Loaded, Provider
from optimizer.load.weights import SourceWeights
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.recipe.schema import Model


def takes(section: Model, folder: Path) -> bool:
    """Return True: this provider is the last, and takes every source that no other takes."""
    del section, folder
    return True


def read(section: Model, folder: Path, config: Any, scratch: Path) -> Loaded:
    """Read the tensors of a checkpoint in transformers' format. Raises CheckpointError as
    weights.find."""
    files = complete_config(folder, section.model_type, scratch)
    stored = weights.find(folder, section)
    return Loaded(files, conversions.read_converted(stored, section, files, config))


def verify(section: Model, folder: Path, pairing: SourceWeights, out: Path) -> None:
    """Check what load wrote: raise OptimizeError naming the first parameter that differs from the
    source."""
    with make_temporary_folder("load") as scratch:
        files = complete_config(folder, section.model_type, scratch)
        faithful.check(files, section, open_checkpoint(out).tensors.as_written, pairing)


TRANSFORMERS = Provider("transformers", takes, read, verify)
