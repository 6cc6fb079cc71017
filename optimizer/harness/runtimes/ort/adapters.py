"""Read the LoRA adapters of a bundle: matrices that a run may give to the graph.

adapters/NAME.safetensors holds, for each module that adapter NAME changes, under the names of the
graph's inputs (lower/onnx/optional/adapters.py) and in float32:

    MODULE.lora_A   (in, rank)
    MODULE.lora_B   (rank, out), times the adapter's scaling
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BundleError
from ...inputs.batch import Array
from ...trust.verify import parse

A, B = ".lora_A", ".lora_B"
LENGTH = 8  # bytes before the header of a safetensors file
HEADER = 50_000_000  # maximum bytes of that header


def read(file: Path) -> dict[str, Array]:
    """Read a LoRA adapter's file for ONNX Runtime as {graph input: float32 matrix}.

    Raises BundleError for a damaged file.
    """
    try:
        data = file.read_bytes()
        size = int.from_bytes(data[:LENGTH], "little")
        if not 0 < size <= min(HEADER, len(data)):
            raise ValueError(f"a header of {size} bytes")
        entries = parse(data[LENGTH : LENGTH + size])
        entries.pop("__metadata__", None)
        rest = memoryview(data)[LENGTH + size :]
        return {name: _matrix(entry, rest) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise BundleError(
            f"the adapter cannot be read ({e})", where=str(file), fix="Package the model again."
        ) from None


def _matrix(entry: Mapping[str, Any], data: memoryview) -> Array:
    """Read the adapter's matrix that an entry of the safetensors header describes.

    data: the bytes after the header

    Raises ValueError if it is not a float32 matrix inside `data`.
    """
    shape = tuple(map(int, entry["shape"]))
    start, stop = map(int, entry["data_offsets"])
    if entry["dtype"] != "F32" or len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"{entry['dtype']} of shape {shape}, not F32 matrices")
    if not 0 <= start <= stop <= len(data) or stop - start != 4 * math.prod(shape):
        raise ValueError(f"bytes {start} to {stop} of shape {shape}")
    return np.frombuffer(data[start:stop], "<f4").astype(np.float32).reshape(shape)
