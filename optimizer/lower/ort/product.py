"""Fuse a product of integers and its bias to MatMulIntegerToFloat, an operator of ONNX Runtime.

    MatMul(DequantizeLinear(x), DequantizeLinear(W)) + b  ->  MatMulIntegerToFloat(x, W, .., b)

in a graph that ort_qdq has lowered. ONNX Runtime itself fuses the product and leaves the Add,
another pass over every output (docs/decisions/0009). Both round
alike, so no bit changes.

Left to ONNX Runtime:
 1. weights in groups, of 4 bits or with zero points; inputs that are not quantized
 2. a product that is used elsewhere, or whose addend is not an initializer of one number per output
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from optimizer.export.scopes import module_of
from optimizer.lower.onnx.examine import find_maker, take_over

DOMAIN = "com.microsoft"
OPERATOR = "MatMulIntegerToFloat"
BIAS = 6  # index of the input


@dataclass(frozen=True)
class _Biased:
    """A product of integers in a lowered graph and the bias added to it: product(DequantizeLinear
    x, DequantizeLinear weight) + bias."""

    product: ir.Node
    x: ir.Node
    weight: ir.Node
    sum: ir.Node
    bias: ir.Value


def fuse(model: ir.Model) -> tuple[str, ...]:
    """Fuse products of integers with their biases for ONNX Runtime, in place. Returns the modules
    of the products."""
    done = []
    for node in list(model.graph):
        biased = _biased(node) if node.op_type == "MatMul" else None
        if biased is not None:
            done.append(module_of(node))
            _rewrite(model, biased)
    if done:
        model.opset_imports[DOMAIN] = 1
    RemoveUnusedNodesPass()(model)
    return tuple(done)


def _biased(product: ir.Node) -> _Biased | None:
    """Recognise a MatMul of the lowered graph that can be fused, with its bias; None for others."""
    x, weight = (find_maker(value, "DequantizeLinear") for value in product.inputs)
    if x is None or weight is None or not _per_column(weight) or not _of_a_tensor(x):
        return None
    users = [node for node, _ in product.outputs[0].uses()]
    if len(users) != 1 or users[0].op_type != "Add" or product.outputs[0].is_graph_output():
        return None
    total = users[0]
    bias = next((v for v in total.inputs if v is not product.outputs[0]), None)
    columns = weight.inputs[0].shape[-1] if weight.inputs[0] and weight.inputs[0].shape else None
    if bias is None or not bias.is_initializer() or bias.shape is None:
        return None
    return _Biased(product, x, weight, total, bias) if list(bias.shape) == [columns] else None


def _per_column(weight: ir.Node) -> bool:
    """Test, to fuse a product, that a DequantizeLinear reads int8 without zero points, by a scale
    per output or one."""
    integers, scale = weight.inputs[:2]
    again = find_maker(integers, "Reshape")  # further use of a layer, see qdq.py
    stored = again.inputs[0] if again is not None else integers
    int8 = stored is not None and stored.is_initializer() and stored.dtype == ir.DataType.INT8
    return int8 and len(weight.inputs) == 2 and scale is not None and len(scale.shape or ()) < 2


def _of_a_tensor(x: ir.Node) -> bool:
    """Test, to fuse a product, that a DequantizeLinear reads uint8 with one constant scale and zero
    point for the entire tensor."""
    constants = [v for v in x.inputs[1:] if v is not None and v.is_initializer()]
    single = len(constants) == 2 and all(
        v.shape is not None and not len(v.shape) for v in constants
    )
    return single and constants[1].dtype == ir.DataType.UINT8


def _rewrite(model: ir.Model, biased: _Biased) -> None:
    """Insert MatMulIntegerToFloat in place of a product and its bias; it takes the name and the
    readers of the sum."""
    integers, scale, zero = biased.x.inputs
    weight, column_scale = biased.weight.inputs
    node = ir.node(
        OPERATOR,
        [integers, weight, scale, column_scale, zero, None, biased.bias],
        domain=DOMAIN,
        name=biased.product.name,
        metadata_props=dict(biased.product.metadata_props),
    )
    model.graph.insert_before(biased.product, node)
    take_over(biased.sum.outputs[0], node.outputs[0])
