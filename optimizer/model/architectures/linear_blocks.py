"""Facts about the linear layers of blocks, as families.py states them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SmoothPair:
    """producer and consumers, relative to a block.

    part: (i, n) when only the i-th of n equal slices of the producer's rows feeds the consumers
    (a fused query/key/value or gate/up projection). grouped: the producer makes values for
    key/value heads, each read by several query heads, so the consumers' factors repeat by head.
    """

    producer: str
    consumers: tuple[str, ...]
    part: tuple[int, int] = (0, 1)
    grouped: bool = False


@dataclass(frozen=True)
class FeedForward:
    """The neurons of a block: row i of each of `up` (of a gated one gate and up; of a fused one
    each of `parts` equal slices of its rows) computes neuron i, which column i of `down` reads.
    width: the config's name for how many there are."""

    up: tuple[str, ...]
    down: str
    width: str = "intermediate_size"
    parts: int = 1


@dataclass(frozen=True)
class Heads:
    """The attention of a block whose config carries the size of a head, so that there can be fewer
    heads on the same hidden width. A key/value head goes with the query heads that read it, which
    lie side by side.

    heads, groups, size: the config's names for query heads, key/value heads and the size of one.
    divides: the field that the number of query heads must divide, where transformers asks it.
    """

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    heads: str = "num_attention_heads"
    groups: str = "num_key_value_heads"
    size: str = "head_dim"
    divides: str = ""
