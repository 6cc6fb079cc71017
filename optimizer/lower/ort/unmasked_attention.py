"""Fuse an attention without a mask to ONNX Runtime's MultiHeadAttention, eleven operators in one.

    softmax(q k' scale + 0) v, heads brought before the positions and back

in an encoder's graph. Plain operators copy queries, keys, values and the result to reorder axes;
the fused one reads them in place (docs/decisions/0010). An
attention is recognised by

 1. q, k and v are [batch, positions, heads * width] split by one constant shape, and brought to
    [batch, heads, positions, width], k with its last two axes exchanged
 2. the scores are scaled by a constant, or not at all
 3. nothing is added to them, or a mask that is 0 for all inputs (Where of a condition that is true
    everywhere), as transformers writes for images
 4. the heads are laid side by side again, and no inner value is read elsewhere

Other forms stay as they are. So do masks, with which the operator did not get faster
(docs/decisions/0010).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from optimizer.export.scopes import MODULE, module_of
from optimizer.lower.onnx.attention_form import OtherForm, perm_of, user
from optimizer.lower.onnx.examine import constant, maker, take_over

DOMAIN = "com.microsoft"
OPERATOR = "MultiHeadAttention"
FORWARD, KEYS = (0, 2, 1, 3), (0, 2, 3, 1)


@dataclass(frozen=True)
class _Attention:
    """Attention of one layer: flat q, k and v, and the output node that lays heads side by side."""

    operands: tuple[ir.Value, ir.Value, ir.Value]
    heads: int
    scale: float
    output: ir.Node


def fuse(model: ir.Model) -> tuple[str, ...]:
    """Rewrite `model`, an encoder of ONNX's operators, in place. Returns the fused attentions."""
    inferred = model.clone()  # so that no inferred shape is written
    ShapeInferencePass()(inferred)
    values = (v for n in inferred.graph for v in n.outputs)
    flat = {str(v.name): v.shape for v in values if v.shape is not None and len(v.shape) == 3}
    done = []
    for softmax in [n for n in model.graph if n.op_type == "Softmax"]:
        try:
            attention = _recognise(softmax, flat)
        except OtherForm:
            continue
        done.append(module_of(softmax))
        _rewrite(model, attention, module_of(softmax))
    if done:
        model.opset_imports[DOMAIN] = 1
        RemoveUnusedNodesPass()(model)
    return tuple(done)


def _recognise(softmax: ir.Node, flat: Mapping[str, ir.Shape]) -> _Attention:
    """Recognise cases 1 to 4, or raise OtherForm.

    flat: {value with three axes: shape}
    """
    axis = softmax.attributes.get("axis")
    if axis is not None and axis.as_int() not in (-1, 3):
        raise OtherForm(f"{softmax.name} is along another axis than the keys")
    if softmax.outputs[0].is_graph_output():
        raise OtherForm(f"{softmax.name} is read from outside")
    scale, product = _scores(softmax.inputs[0])
    weighted = user(softmax.outputs[0], "MatMul")
    if weighted.inputs[0] is not softmax.outputs[0]:
        raise OtherForm(f"{weighted.name} has the weights behind the values")
    merged = user(user(weighted.outputs[0], "Transpose", perm=FORWARD).outputs[0], "Reshape")
    target = constant(merged.inputs[1])
    q, split = _flat(product.inputs[0], FORWARD, flat)
    k, keys = _flat(product.inputs[1], KEYS, flat)
    v, values = _flat(weighted.inputs[1], FORWARD, flat)
    positions, heads, width = split
    together = target[1:] if target is not None else None
    if not (split == keys == values) or together != [positions, heads * width]:
        raise OtherForm(f"{merged.name} lays heads out in another way than side by side")
    return _Attention((q, k, v), heads, scale, merged)


def _scores(value: ir.Value | None) -> tuple[float, ir.Node]:
    """(scale, MatMul of queries and keys) of the softmax's input `value` (cases 2 and 3)."""
    added = maker(value, "Add")
    if added is not None:
        masks = [v for v in added.inputs if v is not None and _is_zero(v)]
        if not masks:
            raise OtherForm(f"{added.name} adds something to the scores")
        value = next(v for v in added.inputs if v is not masks[0])
    scaled, scale = maker(value, "Mul"), 1.0
    if scaled is not None:
        numbers = [constant(v) for v in scaled.inputs]
        by = next((n[0] for n in numbers if n is not None and len(n) == 1), None)
        if by is None:
            raise OtherForm(f"{scaled.name} scales by something that is not a constant")
        scale = float(by)
        value = next(v for v, n in zip(scaled.inputs, numbers, strict=True) if n is None)
    product = maker(value, "MatMul")
    if product is None:
        raise OtherForm("the scores are not a product")
    return scale, product


def _flat(
    value: ir.Value | None, perm: tuple[int, ...], flat: Mapping[str, ir.Shape]
) -> tuple[ir.Value, list[int]]:
    """Case 1: flat operand before Reshape and Transpose, [positions, heads, head width]."""
    transpose = maker(value, "Transpose")
    split = maker(transpose.inputs[0], "Reshape") if transpose is not None else None
    if transpose is None or split is None or perm_of(transpose) != perm:
        raise OtherForm("an operand is not heads brought before the positions")
    shape, source = constant(split.inputs[1]), split.inputs[0]
    read = flat.get(str(source.name)) if source is not None else None
    if source is None or shape is None or len(shape) != 4 or read is None:
        raise OtherForm(f"{split.name} splits in another way than into heads")
    if [shape[1], shape[2] * shape[3]] != list(read[1:]):
        raise OtherForm(f"{split.name} splits in another way than into heads")
    return source, shape[1:]


def _is_zero(value: ir.Value) -> bool:
    """Test that `value` is 0 everywhere for all inputs of the graph."""
    if value.is_initializer() and value.const_value is not None:
        return not np.any(value.const_value.numpy())
    node = value.producer()
    if node is not None and node.op_type == "Expand" and node.inputs[0] is not None:
        return _is_zero(node.inputs[0])
    if node is not None and node.op_type == "Where" and node.inputs[1] is not None:
        return _is_true(node.inputs[0]) and _is_zero(node.inputs[1])
    return False


def _is_true(value: ir.Value | None) -> bool:
    while expanded := maker(value, "Expand"):
        value = expanded.inputs[0]
    if value is None or not value.is_initializer() or value.const_value is None:
        return False
    return bool(np.all(value.const_value.numpy()))


def _rewrite(model: ir.Model, attention: _Attention, module: str) -> None:
    node = ir.node(
        OPERATOR,
        [*attention.operands],
        {"num_heads": attention.heads, "scale": attention.scale},
        domain=DOMAIN,
        name=f"{module}/{OPERATOR}",
        metadata_props={MODULE: module},
    )
    model.graph.insert_before(attention.output, node)
    take_over(attention.output.outputs[0], node.outputs[0])
