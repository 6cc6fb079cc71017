"""A product of integers and its bias in one operator, ONNX Runtime's MatMulIntegerToFloat.

    MatMul(DequantizeLinear(x), DequantizeLinear(W)) + b  ->  MatMulIntegerToFloat(x, W, .., b)

in a graph that ort_qdq has lowered. ONNX Runtime makes that operator of the first form itself and
leaves the Add behind it: another pass over every output (docs/decisions/0009).
Both forms round alike, so no value changes by a bit.

Left as they are, for ONNX Runtime to make of them what it does:
 1. weights in groups, of 4 bits or with zero points; inputs that are not quantized
 2. a product without a bias: what is added is no initializer of one number per output, or the
    product is used elsewhere as well
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from optimizer.export.passes.clean import module_of
from optimizer.lower.onnx.examine import maker, take_over

DOMAIN = "com.microsoft"
OPERATOR = "MatMulIntegerToFloat"
BIAS = 6  # which of its inputs


@dataclass(frozen=True)
class _Biased:
    """product(DequantizeLinear x, DequantizeLinear weight) + bias."""

    product: ir.Node
    x: ir.Node
    weight: ir.Node
    sum: ir.Node
    bias: ir.Value


def fuse(model: ir.Model) -> tuple[str, ...]:
    """Rewrite `model` in place. Returns the modules whose products were rewritten."""
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
    x, weight = (maker(value, "DequantizeLinear") for value in product.inputs)
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
    """int8, symmetric, one scale per output or one in all."""
    integers, scale = weight.inputs[:2]
    again = maker(integers, "Reshape")  # of a layer's further uses, see qdq.py
    codes = again.inputs[0] if again is not None else integers
    kinds = codes is not None and codes.is_initializer() and codes.dtype == ir.DataType.INT8
    return kinds and len(weight.inputs) == 2 and scale is not None and len(scale.shape or ()) < 2


def _of_a_tensor(x: ir.Node) -> bool:
    """uint8, by one scale and zero point that are known."""
    constants = [v for v in x.inputs[1:] if v is not None and v.is_initializer()]
    known = len(constants) == 2 and all(v.shape is not None and not len(v.shape) for v in constants)
    return known and constants[1].dtype == ir.DataType.UINT8


def _rewrite(model: ir.Model, biased: _Biased) -> None:
    integers, scale, zero = biased.x.inputs
    codes, column_scale = biased.weight.inputs
    node = ir.node(
        OPERATOR,
        [integers, codes, scale, column_scale, zero, None, biased.bias],
        domain=DOMAIN,
        name=biased.product.name,
        metadata_props=dict(biased.product.metadata_props),
    )
    model.graph.insert_before(biased.product, node)
    take_over(biased.sum.outputs[0], node.outputs[0])
