"""KV cache of a graph: names and sizes of its arrays, and the position ids of new tokens.

For each layer i the graph takes past_key_values.{i}.key and .value and returns present.{i}.key and
.value, each (batch, kv_heads, past or total, head_dim).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .batch import Array

if TYPE_CHECKING:
    from ..contract import Generation

PARTS = ("key", "value")
PAST, PRESENT = "past_key_values", "present"


def past_name(layer: int | str, part: str) -> str:
    """Return the name of the graph input with a layer's past keys or values.

    layer: number of the layer, or a placeholder in a pattern.
    """
    return f"{PAST}.{layer}.{part}"


def present_name(layer: int | str, part: str) -> str:
    """Return the name of the KV cache's graph output that becomes the input `past_name` in the next
    step."""
    return f"{PRESENT}.{layer}.{part}"


def list_names(layers: int) -> list[tuple[str, str]]:
    """Return (input name, output name) of each array of the KV cache, starting with layer 0."""
    return [(past_name(i, p), present_name(i, p)) for i in range(layers) for p in PARTS]


def is_past(name: str) -> bool:
    """Return True for the name of a graph input that is part of the KV cache."""
    return name.startswith(f"{PAST}.")


def is_present(name: str) -> bool:
    """Return True for the name of a graph output that is part of the KV cache."""
    return name.startswith(f"{PRESENT}.")


def past_of(present: str) -> str:
    """Return the name of the KV cache's graph input that the output `present` becomes in the next
    step."""
    return PAST + present.removeprefix(PRESENT)


def read_itemsize(inputs: Mapping[str, np.dtype[Any] | None]) -> int:
    """Return the bytes of one element of the KV cache; 4, as of float32, if no type is known.

    inputs: {name of a graph input: element type, or None if unknown}.
    """
    kinds = {kind for name, kind in inputs.items() if kind is not None and is_past(name)}
    return max((kind.itemsize for kind in kinds), default=4)


def text_bytes(spec: Generation, tokens: int, itemsize: int) -> int:
    """Return the bytes of the KV cache of one sequence.

    tokens: length of the sequence.
    itemsize: bytes per element.
    """
    return len(PARTS) * spec.layers * spec.kv_heads * spec.head_dim * tokens * itemsize


def position_ids(mask: Array, new: int) -> Array:
    """Return a decoder's input position ids of the last `new` columns, int64 (batch, new).

    The position of a token is the number of real tokens before it; padding on the left has 0.
    mask: (batch, past + new), 0 where padded.
    """
    counted = np.maximum(np.asarray(mask, np.int64).cumsum(1) - 1, 0)
    return np.asarray(counted[:, mask.shape[1] - new :])
