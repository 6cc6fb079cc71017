"""Quantize sentence embeddings as sentence-transformers' quantize_embeddings does, bit for bit.

    uint8    clip(floor((x - low) / step), 0, 255)    step = (high - low) / 255, or 1 where it is 0
    int8     uint8 - 128
    ubinary  a bit per number, 1 above 0, eight to a byte, the first number in the highest bit
    binary   ubinary - 128, as int8
    float32  x

low and high are the ranges of the contract for the vector's number of dimensions. All arithmetic is
in float32. Vector stores take int8 and uint8 as they are, and ubinary as bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...embedding_settings import TYPES
from ...inputs.batch import Array

if TYPE_CHECKING:
    from ...contract import Contract


def quantize(vectors: Array, kind: str, ranges: Array | None) -> Array:
    """Quantize embeddings (batch, dimensions), as an answer of the task.

    Returns (batch, dimensions), or (batch, ceil(dimensions / 8)) of packed bits for binary and
    ubinary.

    kind: name of embedding_settings.TYPES
    ranges: (2, dimensions), lowest and highest value of each dimension; required for int8 and uint8
    """
    record = TYPES[kind]
    if record.bits == 1:
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if record.dtype == "uint8" else (bits - 128).astype(np.int8)
    if not record.ranged:
        return vectors
    assert ranges is not None
    low, step = steps(ranges)
    codes = np.clip(np.floor((vectors - low) / step), 0, 255)
    return codes.astype(np.uint8) if record.dtype == "uint8" else (codes - 128).astype(np.int8)


def steps(ranges: Array) -> tuple[Array, Array]:
    """Return (lowest value, step) of each dimension of quantized embeddings; the step is 1 where
    the range is empty.

    ranges: (2, dimensions), lowest and highest value
    """
    low, high = ranges.astype(np.float32)
    step = (high - low) / 255
    return low, np.where(step == 0, np.float32(1), step)


def read_ranges(contract: Contract, dimensions: int) -> Array | None:
    """Return the contract's ranges for embeddings of `dimensions`, (2, dimensions); None without
    any."""
    forms = contract.vectors.quantized
    ranges = None if forms is None else forms.ranges.get(str(dimensions))
    return None if ranges is None else np.array(ranges, np.float32)
