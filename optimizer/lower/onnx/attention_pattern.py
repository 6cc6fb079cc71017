"""Recognise a decoder's attention as the export stage writes it.

It is found by the names of its KV cache, past_key_values.<i>.key and present.<i>.key:

    softmax(q k' scale + mask) v, on keys and values repeated for every group of query heads

 1. the repetition may be absent (equal numbers of key and query heads)
 2. the scale may be absent, because q was scaled before; or divide instead of multiplying
 3. present is past with the new tokens appended along the sequence
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from optimizer.harness.inputs.kv_cache import PARTS, past_name, present_name
from optimizer.lower.onnx.examine import find_maker, find_only_user, read_constant


class OtherPattern(Exception):
    """Raised while attentions are fused, where the nodes of a layer differ from the pattern; the
    message names the first difference."""


@dataclass(frozen=True)
class Fused:
    """Result of fusing a decoder's attentions while its graph is lowered.

    modules: fused attentions
    left: {layer: reason why it was not fused}
    """

    modules: tuple[str, ...]
    left: Mapping[str, str]


@dataclass(frozen=True)
class Attention:
    """Attention of one layer, as the nodes of an exported graph, before a lowering fuses it.

    query: [batch, heads, sequence, width]
    cached: present keys and values [batch, kv_heads, total, width]
    repeated: present keys and values, repeated for every query head
    appended: keys and values of the new tokens
    softmax, weighted: nodes of the probabilities and of their product with the values
    """

    query: ir.Value
    cached: tuple[ir.Value, ir.Value]
    repeated: tuple[ir.Value, ir.Value]
    appended: tuple[ir.Value, ir.Value]
    repeats: int
    scale: float
    mask: ir.Value
    softmax: ir.Node
    weighted: ir.Node


def recognise(
    inputs: Mapping[str, ir.Value], outputs: Mapping[str, ir.Value], index: int
) -> Attention:
    """Recognise the attention of layer `index`, from its KV cache among the graph's inputs and
    outputs; raises OtherPattern."""
    key, value = (outputs.get(present_name(index, n)) for n in PARTS)
    if key is None or value is None:
        raise OtherPattern("its cache has no present")
    new_key, new_value = (
        _appended(inputs[past_name(index, n)], v) for v, n in zip((key, value), PARTS, strict=True)
    )
    repeats, keys = _repeated(key)
    transpose = find_user(keys, "Transpose", perm=(0, 1, 3, 2))
    product = find_user(transpose.outputs[0], "MatMul")
    scale, scores = _scaled(product.outputs[0])
    masked = find_user(scores, "Add")
    mask = next(v for v in masked.inputs if v is not scores)
    softmax = find_user(masked.outputs[0], "Softmax")
    weighted = find_user(softmax.outputs[0], "MatMul")
    again, values = _repeated(value)
    if weighted.inputs[1] is not values or again != repeats:
        raise OtherPattern("its weights multiply something other than the cached values")
    query = product.inputs[0]
    assert query is not None
    assert mask is not None
    return Attention(
        query=query,
        cached=(key, value),
        repeated=(keys, values),
        appended=(new_key, new_value),
        repeats=repeats,
        scale=scale,
        mask=mask,
        softmax=softmax,
        weighted=weighted,
    )


def find_user(value: ir.Value, op: str, perm: tuple[int, ...] | None = None) -> ir.Node:
    """Return the node, an `op`, that alone uses `value`; raise OtherPattern where there is none."""
    node = find_only_user(value)
    if node is None or node.op_type != op or (perm is not None and get_perm(node) != perm):
        operator = "nothing or several" if node is None else node.op_type
        raise OtherPattern(f"{value.name} goes to {operator}, not to one {op}")
    return node


def get_perm(node: ir.Node) -> tuple[int, ...]:
    """Return the attribute `perm` of a Transpose in the graph that is lowered: the order of its
    output's axes."""
    attribute = node.attributes.get("perm")
    return tuple(attribute.as_ints()) if attribute is not None else ()


def _appended(past: ir.Value, present: ir.Value) -> ir.Value:
    """Find the keys or values of the new tokens: `present` is `past` with these appended (case
    3)."""
    node = find_maker(present, "Concat")
    if node is None or len(node.inputs) != 2 or node.inputs[0] is not past:
        raise OtherPattern(f"{present.name} is not past with new tokens appended")
    if node.attributes["axis"].as_int() not in (-2, 2) or node.inputs[1] is None:
        raise OtherPattern(f"{present.name} grows along another axis than the sequence")
    return node.inputs[1]


def _repeated(cached: ir.Value) -> tuple[int, ir.Value]:
    """Find the repetition of keys or values for their query heads (case 1).

    It is Unsqueeze, Expand to [batch, kv_heads, n, tokens, width] and Reshape to [batch, kv_heads
    n, tokens, width]. Returns n and the repeated tensor; (1, cached) without a repetition.
    """
    node = find_only_user(cached)
    if node is None or node.op_type != "Unsqueeze":
        return 1, cached  # case 1
    if read_constant(node.inputs[1]) != [2]:
        raise OtherPattern(f"{cached.name} is repeated along another axis than its heads")
    expand = find_user(node.outputs[0], "Expand")
    sizes = read_constant(expand.inputs[1])
    if sizes is None or len(sizes) != 5 or sizes[3:] != [1, 1] or sizes[:2] != [1, 1]:
        raise OtherPattern(f"how often {cached.name} is repeated cannot be read")
    return int(sizes[2]), find_user(expand.outputs[0], "Reshape").outputs[0]


def _scaled(product: ir.Value) -> tuple[float, ir.Value]:
    """Find, in an exported attention, the factor and the scaled scores of `product`, q k' (case 2).

    Returns (1.0, product) without a scale.
    """
    node = find_only_user(product)
    if node is not None and node.op_type in ("Mul", "Div"):
        by = next((v for v in node.inputs if v is not product), None)
        factors = read_constant(by)
        if factors is None or len(factors) != 1:
            raise OtherPattern(f"{product.name} is scaled by something that is not a constant")
        factor = float(factors[0])
        return factor if node.op_type == "Mul" else 1 / factor, node.outputs[0]
    return 1.0, product
