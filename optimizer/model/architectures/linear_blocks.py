"""Records of the linear layers of blocks, for rows of families.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SmoothPair:
    """Fact of an architecture: module whose output channels may be scaled down (producer), and
    linear layers that read them, whose input channels are scaled up by the same factors
    (consumers).

    part: (i, n) if only the i-th of n equal slices of the producer's rows feeds the consumers (a
        fused query/key/value or gate/up projection)
    grouped: True if the producer makes values for key/value heads that several query heads read, so
        that the consumers' factors repeat by head
    """

    producer: str
    consumers: tuple[str, ...]
    part: tuple[int, int] = (0, 1)
    grouped: bool = False


@dataclass(frozen=True)
class FeedForward:
    """Fact of an architecture: linear layers of a block's MLP. Row i of each layer in `up` computes
    neuron i, and column i of `down` reads it."""

    up: tuple[str, ...]  # one layer, or gate and up
    down: str
    width: str = "intermediate_size"  # the config's name for the number of neurons
    parts: int = (
        1  # equal slices of `up`'s rows that each have a row per neuron (fused gate and up)
    )


@dataclass(frozen=True)
class Heads:
    """Fact of an architecture: attention of a block whose config states the size of a head, so that
    heads can be removed without changing the hidden width. A key/value head is removed together
    with its query heads, which are adjacent.

    heads, groups: names in the config for the numbers of query heads and of key/value heads
    size: name in the config for the size of a head
    divides: name in the config of a number that the number of query heads must divide, where
        transformers requires it
    """

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    heads: str = "num_attention_heads"
    groups: str = "num_key_value_heads"
    size: str = "head_dim"
    divides: str = ""
