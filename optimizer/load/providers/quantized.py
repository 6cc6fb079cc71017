"""A folder of integers in GPTQ's, AWQ's or compressed-tensors' format: read as the floats they
stand for, and kept as integers beside them for method: pass_through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimizer.load import weights
from optimizer.load.providers.provider import Loaded, Provider
from optimizer.load.quantized import folder as integers
from optimizer.load.weights import Weights
from optimizer.recipe.schema import Model


def takes(section: Model, folder: Path) -> bool:
    """By what config.json says of the weights. Raises CheckpointError for an unknown format."""
    del section
    return integers.find(folder) is not None


def read(section: Model, folder: Path, config: Any, scratch: Path) -> Loaded:
    """Raises CheckpointError as weights.find."""
    del config, scratch
    return Loaded(folder, weights.find(folder, section))


def verify(section: Model, folder: Path, chosen: Weights, out: Path) -> None:
    """Writes the state, and raises LedgerError when it and the checkpoint hold other numbers."""
    del section
    integers.keep(folder, chosen.chosen, out)


QUANTIZED = Provider("quantized", takes, read, verify)
