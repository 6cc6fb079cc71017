"""Queries, keys and values of an attention by one product.

    q, k, v = x Wq, x Wk, x Wv          ->  qkv = x [Wq | Wk | Wv]

in a graph that ort_qdq has lowered: the codes, scales and zero points of the three are put side by
side, and GroupQueryAttention takes the packed result as its first input. A product of one token
with a small matrix costs more to start than to do (docs/decisions/0017).
A column of a product depends on that column alone, so packing
changes no value.

Not packed, and left as they are:
 1. the three read different tensors, or one is used elsewhere as well
 2. something comes between product and attention (a bias, a norm of each head)
 3. one is float, or they are coded differently: other bits, groups, or one scale per tensor

Law (tested): unpack(pack(model)) has the same nodes and initializers as `model`, so whatever looks
at single modules may unpack first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimizer.export.passes.clean import MODULE, module_of
from optimizer.lower.onnx.examine import maker

PARTS = "packed"  # metadata of a packed product: what unpack needs, as JSON
NAMES = ("codes", "scale", "zero_point")


def pack(model: ir.Model) -> dict[str, str]:
    """Pack in place. Returns {module: the initializer that now holds its codes}."""
    packed = {}
    for attention in [n for n in model.graph if n.op_type == "GroupQueryAttention"]:
        products = _products(attention)
        if products:
            codes = _join(model, attention, products)
            packed.update({module_of(p): codes for p in products})
    return packed


def _products(attention: ir.Node) -> list[ir.Node]:
    """The products of q, k and v; none in cases 1 to 3."""
    producers = [maker(v, "MatMul") for v in attention.inputs[:3]]
    products = [n for n in producers if n is not None]
    weights = [maker(n.inputs[1], "DequantizeLinear") for n in products]
    if len(products) != 3 or any(w is None for w in weights):
        return []
    single = all(len(list(n.outputs[0].uses())) == 1 for n in (*products, *weights) if n)
    alike = {_coding(w) for w in weights if w is not None}
    same = len({n.inputs[0] for n in products}) == 1
    return products if single and same and len(alike) == 1 and None not in alike else []


def _coding(weight: ir.Node) -> tuple[object, ...] | None:
    """What must agree: types, ranks and attributes. None for a scale that belongs to no column."""
    tensors = [v.const_value if v is not None else None for v in weight.inputs]
    if any(t is None for t in tensors) or not len(tensors[1].shape):  # type: ignore[union-attr]
        return None
    kinds = tuple((t.dtype, len(t.shape)) for t in tensors if t is not None)
    return (kinds, tuple(sorted((a.name, a.value) for a in weight.attributes.values())))


def _join(model: ir.Model, attention: ir.Node, products: Sequence[ir.Node]) -> str:
    """Replace three products by one. Returns the name of its codes."""
    graph, module = model.graph, module_of(attention)
    weights = [n for p in products if (n := maker(p.inputs[1], "DequantizeLinear"))]
    operands = []
    for i, name in enumerate(NAMES[: len(weights[0].inputs)]):
        parts = [t.numpy() for w in weights if (t := _tensor(w.inputs[i])) is not None]
        operands.append(_initializer(graph, f"{module}.qkv_{name}", np.concatenate(parts, axis=-1)))
    dequantize = ir.node(
        "DequantizeLinear",
        operands,
        {a.name: a.value for a in weights[0].attributes.values()},
        name=f"{module}.qkv/weight",
        metadata_props={MODULE: module},
    )
    recipes = [
        {
            "module": module_of(p),
            "nodes": [w.name, p.name],
            "values": [w.outputs[0].name, p.outputs[0].name],
            "operands": [v.name for v in w.inputs if v is not None],
            "columns": _columns(w),
        }
        for p, w in zip(products, weights, strict=True)
    ]
    product = ir.node(
        "MatMul",
        [products[0].inputs[0], dequantize.outputs[0]],
        name=f"{module}.qkv/MatMul",
        metadata_props={MODULE: module, PARTS: json.dumps(recipes)},
    )
    dequantize.outputs[0].name, product.outputs[0].name = (
        f"{module}.qkv/weight",
        f"{module}.qkv/MatMul:0",
    )
    for node in (dequantize, product):
        graph.insert_before(attention, node)
    for i, value in enumerate((product.outputs[0], None, None)):
        attention.replace_input_with(i, value)
    _remove(graph, [*products, *weights])
    return str(operands[0].name)


def unpack(model: ir.Model) -> None:
    """Undo pack, in place."""
    graph = model.graph
    for packed in [n for n in graph if PARTS in n.metadata_props]:
        weight = maker(packed.inputs[1], "DequantizeLinear")
        attention = next(iter(packed.outputs[0].uses()))[0]
        assert weight is not None
        start = 0
        for i, part in enumerate(json.loads(packed.metadata_props[PARTS])):
            columns = slice(start, start := start + part["columns"])
            operands = [
                _initializer(graph, name, t.numpy()[..., columns])
                for name, v in zip(part["operands"], weight.inputs, strict=True)
                if (t := _tensor(v)) is not None
            ]
            where = {MODULE: part["module"]}
            attributes = {a.name: a.value for a in weight.attributes.values()}
            first, second = part["nodes"]
            apart = ir.node(
                "DequantizeLinear", operands, attributes, name=first, metadata_props=where
            )
            product = ir.node(
                "MatMul",
                [packed.inputs[0], apart.outputs[0]],
                name=second,
                metadata_props=dict(where),
            )
            apart.outputs[0].name, product.outputs[0].name = part["values"]
            for node in (apart, product):
                graph.insert_before(packed, node)
            attention.replace_input_with(i, product.outputs[0])
        _remove(graph, [packed, weight])


def _columns(weight: ir.Node) -> int:
    codes = _tensor(weight.inputs[0])
    assert codes is not None
    return int(codes.shape[1])


def _tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    return value.const_value if value is not None else None


def _initializer(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    tensor = ir.tensor(np.ascontiguousarray(array), name=name)
    value = ir.val(name, tensor.dtype, tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def _remove(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    """These nodes, and the initializers that only they used."""
    initializers = [v for n in nodes for v in n.inputs if v is not None and v.is_initializer()]
    graph.remove(list(nodes), safe=True)
    for value in initializers:
        if not list(value.uses()) and value.name in graph.initializers:
            del graph.initializers[str(value.name)]
