"""A decoder's key/value cache, by the names of its graph, and the positions of its tokens.

A graph takes past_key_values.{i}.key and .value and gives present.{i}.key and .value, i counting
the layers; each is (batch, kv_heads, past or total, head_dim).
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
    """Of an input. layer: its number, or what stands for it in a pattern."""
    return f"{PAST}.{layer}.{part}"


def present_name(layer: int | str, part: str) -> str:
    """Of the output that is the input `past_name` of the next step."""
    return f"{PRESENT}.{layer}.{part}"


def names(layers: int) -> list[tuple[str, str]]:
    """(past, present) of each cached array, keys and values of layer 0 first."""
    return [(past_name(i, p), present_name(i, p)) for i in range(layers) for p in PARTS]


def is_past(name: str) -> bool:
    """Whether an input of a graph is part of its cache."""
    return name.startswith(f"{PAST}.")


def is_present(name: str) -> bool:
    """Whether an output of a graph is part of its cache."""
    return name.startswith(f"{PRESENT}.")


def past_of(present: str) -> str:
    """The input that an output becomes in the next step."""
    return PAST + present.removeprefix(PRESENT)


def itemsize(inputs: Mapping[str, np.dtype[Any] | None]) -> int:
    """Bytes of a number of the cache, by the types of a graph's inputs; float32's where it names
    none."""
    kinds = {kind for name, kind in inputs.items() if kind is not None and is_past(name)}
    return max((kind.itemsize for kind in kinds), default=4)


def text_bytes(spec: Generation, tokens: int, itemsize: int) -> int:
    """Bytes of the cache of one text of so many tokens. itemsize: of a number."""
    return len(PARTS) * spec.layers * spec.kv_heads * spec.head_dim * tokens * itemsize


def position_ids(mask: Array, new: int) -> Array:
    """int64 (batch, new), of the last `new` columns: how many real tokens come before one; 0 for
    padding before the first. mask (batch, past + new): 0 where padded."""
    counted = np.maximum(np.asarray(mask, np.int64).cumsum(1) - 1, 0)
    return np.asarray(counted[:, mask.shape[1] - new :])
