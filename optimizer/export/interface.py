"""Inputs and outputs of a graph: the contract's tensors and, for a decoder, its KV cache.

    past_key_values.{i}.key, .value   [batch, kv_heads, past, head_dim]    in, after the contract's
    present.{i}.key, .value           [batch, kv_heads, total, head_dim]   out

in the graph's own float type, i counting the blocks; total = past + sequence. One graph serves
prefill (past = 0) and decode (sequence = 1). `logits` and other outputs are float32 always.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.harness.inputs.kv_cache import PARTS, past_name, present_name


@dataclass(frozen=True)
class InterfacePort:
    """One input or output of the graph to export; each of `axes` is a size, or the name of a
    dynamic axis."""

    name: str
    dtype: str
    axes: tuple[int | str, ...]


@dataclass(frozen=True)
class Interface:
    """Inputs and outputs of the graph to export in order; a decoder's last 2 * layers of each are
    the KV cache."""

    inputs: tuple[InterfacePort, ...]
    outputs: tuple[InterfacePort, ...]
    layers: int = 0


def build_interface(
    contract: Mapping[str, Any], float_type: str = "float32", layers: int | None = None
) -> Interface:
    """Build the interface of the graph to export from the contract.

    float_type: type of the KV cache
    layers: number of blocks, where only the model's first ones are traced; None for all
    """
    inputs = [_port(e) for e in contract["inputs"]]
    outputs = [_port(e) for e in contract["outputs"]]
    cache = contract.get("generation")
    if cache is None:
        return Interface(tuple(inputs), tuple(outputs))
    count = int(cache["layers"]) if layers is None else layers
    for name, axis, ports in ((past_name, "past", inputs), (present_name, "total", outputs)):
        shape = ("batch", int(cache["kv_heads"]), axis, int(cache["head_dim"]))
        ports += [
            InterfacePort(name(i, part), float_type, shape) for i in range(count) for part in PARTS
        ]
    return Interface(tuple(inputs), tuple(outputs), count)


def _port(entry: Mapping[str, Any]) -> InterfacePort:
    return InterfacePort(entry["name"], entry["dtype"], tuple(entry["axes"]))
