"""Fuse an encoder's attention to ONNX Runtime's MultiHeadAttention, eleven operators in one.

    softmax(q k' scale + bias) v, heads brought before the positions and back

Plain operators copy queries, keys, values and the result to reorder axes; the fused one reads them
in place, and on a GPU mostly without writing the scores to memory. An attention is recognised by

 1. q, k and v are [batch, positions, heads * width] split by one shape, either constant or
    [0, 0, heads, width], and brought to [batch, heads, positions, width], k with its last two axes
    exchanged
 2. the scores are scaled by a constant, or not at all
 3. nothing is added to them, or a value that is 0 for all inputs (Where of a condition that is
    true everywhere), as transformers writes for images; with `biased` also masks and position
    biases
 4. the heads are laid side by side again, and no inner value is read elsewhere

Other patterns stay as they are. On a CPU masked attentions do too, which did not get faster
(docs/decisions/0010).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from optimizer.export.scopes import MODULE, module_of
from optimizer.lower.onnx.attention_pattern import OtherPattern, find_user, get_perm
from optimizer.lower.onnx.examine import add_initializer, find_maker, read_constant, take_over

DOMAIN = "com.microsoft"
OPERATOR = "MultiHeadAttention"
FORWARD, KEYS = (0, 2, 1, 3), (0, 2, 3, 1)


@dataclass(frozen=True)
class _EncoderAttention:
    """Attention of one encoder layer in the exported graph, before it is fused for ONNX Runtime.

    operands: flat q, k and v
    width: heads * head width, of a token's heads side by side
    added: values added to the scores, broadcast to [batch, heads, positions, positions]
    output: node that lays heads side by side
    """

    operands: tuple[ir.Value, ir.Value, ir.Value]
    heads: int
    width: int
    scale: float
    added: tuple[ir.Value, ...]
    output: ir.Node


def fuse(model: ir.Model, *, biased: bool = False) -> tuple[str, ...]:
    """Fuse the attentions of `model`, an encoder of ONNX's operators, for ONNX Runtime, in place.
    Returns the fused attentions.

    biased: True to fuse attentions with a mask or a position bias as well
    """
    inferred = model.clone()  # so that no inferred shape is written
    ShapeInferencePass()(inferred)
    values = [v for n in inferred.graph for v in n.outputs]
    flat = {str(v.name): v.shape for v in values if v.shape is not None and len(v.shape) == 3}
    types = {str(v.name): v.type for v in values}
    done: list[str] = []
    biases: dict[tuple[ir.Value, ...], ir.Value] = {}
    for softmax in [n for n in model.graph if n.op_type == "Softmax"]:
        try:
            attention = _recognise(softmax, flat)
        except OtherPattern:
            continue
        if attention.added and not biased:
            continue
        module = module_of(softmax)  # which runs several times where layers share weights
        name = f"{module}/{OPERATOR}" + (f"_{done.count(module)}" if module in done else "")
        done.append(module)
        output = _rewrite(model, attention, name, module, biases)
        output.type = types.get(str(output.name))  # onnx infers none behind another domain's node
        output.shape = output.shape or ir.Shape([None, None, attention.width])
    if done:
        model.opset_imports[DOMAIN] = 1
        RemoveUnusedNodesPass()(model)
    return tuple(done)


def _recognise(softmax: ir.Node, flat: Mapping[str, ir.Shape]) -> _EncoderAttention:
    """Recognise the attention behind a Softmax as one that MultiHeadAttention computes (cases 1, 2
    and 4). Raises OtherPattern for another.

    flat: {value with three axes: shape}
    """
    axis = softmax.attributes.get("axis")
    if axis is not None and axis.as_int() not in (-1, 3):
        raise OtherPattern(f"{softmax.name} is along another axis than the keys")
    if softmax.outputs[0].is_graph_output():
        raise OtherPattern(f"{softmax.name} is read from outside")
    scale, product, added = _scores(softmax.inputs[0])
    weighted = find_user(softmax.outputs[0], "MatMul")
    if weighted.inputs[0] is not softmax.outputs[0]:
        raise OtherPattern(f"{weighted.name} has the weights behind the values")
    merged = find_user(
        find_user(weighted.outputs[0], "Transpose", perm=FORWARD).outputs[0], "Reshape"
    )
    target = read_constant(merged.inputs[1])
    q, split = _flat(product.inputs[0], FORWARD, flat)
    k, keys = _flat(product.inputs[1], KEYS, flat)
    v, values = _flat(weighted.inputs[1], FORWARD, flat)
    positions, heads, width = split
    together = target[1:] if target is not None else None
    if not (split == keys == values) or together != [positions, heads * width]:
        raise OtherPattern(f"{merged.name} lays heads out in another way than side by side")
    return _EncoderAttention((q, k, v), heads, heads * width, scale, added, merged)


def _scores(value: ir.Value | None) -> tuple[float, ir.Node, tuple[ir.Value, ...]]:
    """Parse the softmax's input in an exported attention. Returns the scale, the MatMul of queries
    and keys, and the values added to the scores, without those that are 0 everywhere."""
    addition = find_maker(value, "Add")
    if addition is None:
        return (*_scaled(value), ())
    for scores in addition.inputs:
        other = next((v for v in addition.inputs if v is not scores), None)
        with suppress(OtherPattern):
            scale, product, added = _scores(scores)
            assert other is not None
            return scale, product, added if _is_zero(other) else (*added, other)
    raise OtherPattern(f"{addition.name} adds no product of queries and keys")


def _scaled(value: ir.Value | None) -> tuple[float, ir.Node]:
    """Parse an exported attention's scores before anything is added (case 2). Returns the scale,
    and the MatMul of queries and keys."""
    scaled, scale = find_maker(value, "Mul") or find_maker(value, "Div"), 1.0
    if scaled is not None:
        first, second = (read_constant(v) for v in scaled.inputs)
        commuted = scaled.op_type == "Mul" and second is None
        by = first if commuted else second
        if by is None or len(by) != 1:
            raise OtherPattern(f"{scaled.name} scales by something that is not a constant")
        scale = float(by[0]) if scaled.op_type == "Mul" else 1 / float(by[0])
        value = scaled.inputs[1 if commuted else 0]
    product = find_maker(value, "MatMul")
    if product is None or find_maker(product.inputs[1], "Transpose") is None:
        raise OtherPattern("the scores are not a product of queries and keys")
    return scale, product


def _flat(
    value: ir.Value | None, perm: tuple[int, ...], flat: Mapping[str, ir.Shape]
) -> tuple[ir.Value, list[int]]:
    """Follow an operand of an attention back through its Transpose and Reshape (rule 1 of this
    file) to the value [batch, positions, heads * width].

    perm: axes of the Transpose that the rule asks for
    flat: {value: shape} of values of three axes

    Returns (that value, [positions, heads, width] as the Reshape states them, with positions 0
    where it copies that axis). Raises OtherPattern for anything else.
    """
    transpose = find_maker(value, "Transpose")
    split = find_maker(transpose.inputs[0], "Reshape") if transpose is not None else None
    if transpose is None or split is None or get_perm(transpose) != perm:
        raise OtherPattern("an operand is not heads brought before the positions")
    shape, source = read_constant(split.inputs[1]), split.inputs[0]
    read = flat.get(str(source.name)) if source is not None else None
    if source is None or shape is None or len(shape) != 4 or read is None:
        raise OtherPattern(f"{split.name} splits in another way than into heads")
    positions = 0 if shape[:2] == [0, 0] else read[1]
    if [shape[1], shape[2] * shape[3]] != [positions, read[2]]:
        raise OtherPattern(f"{split.name} splits in another way than into heads")
    return source, shape[1:]


def _is_zero(value: ir.Value) -> bool:
    """Test, to fuse an attention without its mask, that `value` is 0 everywhere for all inputs of
    the graph."""
    if value.is_initializer() and value.const_value is not None:
        return not np.any(value.const_value.numpy())
    node = value.producer()
    if node is not None and node.op_type == "Expand" and node.inputs[0] is not None:
        return _is_zero(node.inputs[0])
    if node is not None and node.op_type == "Where" and node.inputs[1] is not None:
        return _is_true(node.inputs[0]) and _is_zero(node.inputs[1])
    return False


def _is_true(value: ir.Value | None) -> bool:
    while expanded := find_maker(value, "Expand"):
        value = expanded.inputs[0]
    if value is None or not value.is_initializer() or value.const_value is None:
        return False
    return bool(np.all(value.const_value.numpy()))


def _rewrite(
    model: ir.Model,
    attention: _EncoderAttention,
    name: str,
    module: str,
    biases: dict[tuple[ir.Value, ...], ir.Value],
) -> ir.Value:
    """Replace one attention by MultiHeadAttention. Returns its output.

    biases: {values added: their sum}, shared by the layers and extended here"""
    inputs: list[ir.Value | None] = [*attention.operands]
    if attention.added:
        if attention.added not in biases:
            biases[attention.added] = _bias(model, attention, f"attention_bias_{len(biases)}")
        inputs += [None, None, biases[attention.added]]
    node = ir.node(
        OPERATOR,
        inputs,
        {"num_heads": attention.heads, "scale": attention.scale},
        domain=DOMAIN,
        name=name,
        metadata_props={MODULE: module},
    )
    model.graph.insert_before(attention.output, node)
    take_over(attention.output.outputs[0], node.outputs[0])
    return node.outputs[0]


def _bias(model: ir.Model, attention: _EncoderAttention, label: str) -> ir.Value:
    """Insert the sum of the values added to an attention's scores, with a row per query, as ONNX
    Runtime's operator requires (masks have one row for all queries), and return it.

    label: name of the sum
    """

    def insert(op: str, inputs: list[ir.Value], name: str, /, **attributes: int) -> ir.Value:
        node = ir.node(op, inputs, attributes, name=name, metadata_props={MODULE: ""})
        node.outputs[0].name = name
        model.graph.insert_before(attention.output, node)
        return node.outputs[0]

    def fixed(name: str, sizes: list[int]) -> ir.Value:
        known = model.graph.initializers.get(name)
        return known or add_initializer(model.graph, name, np.array(sizes, np.int64))

    total, *more = attention.added
    for i, value in enumerate(more):
        total = insert("Add", [total, value], f"{label}_sum_{i}")
    rows = insert("Shape", [attention.operands[0]], f"{label}_rows", start=1, end=2)
    one = fixed("bias_ones", [1])
    shape = insert("Concat", [one, one, rows, one], f"{label}_shape", axis=0)
    return insert("Expand", [total, shape], label)
