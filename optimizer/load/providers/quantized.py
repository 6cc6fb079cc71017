"""Read a quantized folder (GPTQ, AWQ, compressed-tensors) as floats, and write its integers next to
them for method: pass_through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimizer.load import weights
from optimizer.load.providers.provider import Loaded, Provider
from optimizer.load.quantized import folder as integers
from optimizer.load.weights import SourceWeights
from optimizer.recipe.schema import Model


def takes(section: Model, folder: Path) -> bool:
    """Return True for a folder in a format of READERS. Raises CheckpointError for another
    quantization."""
    del section
    return integers.find(folder) is not None


def read(section: Model, folder: Path, config: Any, scratch: Path) -> Loaded:
    """Read the tensors of a checkpoint whose weights are quantized already. Raises CheckpointError
    as weights.find."""
    del config, scratch
    return Loaded(folder, weights.find(folder, section))


def verify(section: Model, folder: Path, pairing: SourceWeights, out: Path) -> None:
    """Write the checkpoint's own integers to out/quantized; LedgerError where the checkpoint's
    floats differ."""
    del section
    integers.write_state(folder, pairing.source_names, out)


QUANTIZED = Provider("quantized", takes, read, verify)
