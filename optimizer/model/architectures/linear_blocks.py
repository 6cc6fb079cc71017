"""Records of the linear layers of blocks, for rows of families.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SmoothPair:
    """A producer whose output channels are scaled down and consumers that are scaled up.

    part: (i, n) if only the i-th of n equal slices of the producer's rows feeds the consumers (a
        fused query/key/value or gate/up projection)
    grouped: True if the producer makes values for key/value heads that several query heads read,
        so that the consumers' factors repeat by head
    """

    producer: str
    consumers: tuple[str, ...]
    part: tuple[int, int] = (0, 1)
    grouped: bool = False


@dataclass(frozen=True)
class FeedForward:
    """Neurons of a block: row i of each of `up` computes neuron i, column i of `down` reads it."""

    up: tuple[str, ...]  # one layer, or gate and up
    down: str
    width: str = "intermediate_size"  # the config's name for the number of neurons
    parts: int = (
        1  # equal slices of `up`'s rows that each have a row per neuron (fused gate and up)
    )


@dataclass(frozen=True)
class Heads:
    """The attention of a block whose config has the size of a head, so that heads can be removed
    without changing the hidden width. A key/value head is removed with its query heads, which are
    adjacent.

    heads, groups, size: the config's names for the numbers of query heads and key/value heads, and
        for the size of a head
    divides: field that the number of query heads must divide, where transformers requires it
    """

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    heads: str = "num_attention_heads"
    groups: str = "num_key_value_heads"
    size: str = "head_dim"
    divides: str = ""
