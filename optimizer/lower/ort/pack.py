"""Pack the products of an attention's queries, keys and values into one.

    q, k, v = x Wq, x Wk, x Wv          ->  qkv = x [Wq | Wk | Wv]

in a graph that ort_qdq has lowered: integers, scales and zero points of the three are concatenated,
and GroupQueryAttention reads the packed result as its first input. A product of one token with a
small matrix costs more to start than to compute (docs/decisions/0017). A column of a product
depends on that column alone, so values do not change.

Not packed:
 1. the three read different tensors, or one is used elsewhere as well
 2. another operator lies between product and attention (a bias, a norm of each head)
 3. one is float, or they differ in bits or groups, or have one scale per tensor

Law (tested): unpack(pack(model)) has the same nodes and initializers as `model`, so readers of
single modules may unpack first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from optimizer.export.scopes import MODULE, module_of
from optimizer.lower.onnx.examine import find_maker

PARTS = "packed"  # metadata of a packed product, for unpack, as JSON
NAMES = ("codes", "scale", "zero_point")


def pack(model: ir.Model) -> dict[str, str]:
    """Join the products by an attention's q, k and v weights in a lowered graph to one, in place.
    Returns {module: initializer with its integers}."""
    packed = {}
    for attention in [n for n in model.graph if n.op_type == "GroupQueryAttention"]:
        products = _products(attention)
        if products:
            name = _join(model, attention, products)
            packed.update({module_of(p): name for p in products})
    return packed


def _products(attention: ir.Node) -> list[ir.Node]:
    """Return the MatMuls of q, k and v of an attention in a lowered graph; [] in cases 1 to 3 (not
    packed)."""
    producers = [find_maker(v, "MatMul") for v in attention.inputs[:3]]
    products = [n for n in producers if n is not None]
    weights = [find_maker(n.inputs[1], "DequantizeLinear") for n in products]
    if len(products) != 3 or any(w is None for w in weights):
        return []
    single = all(len(list(n.outputs[0].uses())) == 1 for n in (*products, *weights) if n)
    alike = {_quantization(w) for w in weights if w is not None}
    same = len({n.inputs[0] for n in products}) == 1
    return products if single and same and len(alike) == 1 and None not in alike else []


def _quantization(weight: ir.Node) -> tuple[object, ...] | None:
    """Return types, ranks and attributes of a lowered weight, which must agree to join products;
    None for one scale per tensor."""
    tensors = [v.const_value if v is not None else None for v in weight.inputs]
    if any(t is None for t in tensors) or not len(tensors[1].shape):  # type: ignore[union-attr]
        return None
    kinds = tuple((t.dtype, len(t.shape)) for t in tensors if t is not None)
    return (kinds, tuple(sorted((a.name, a.value) for a in weight.attributes.values())))


def _join(model: ir.Model, attention: ir.Node, products: Sequence[ir.Node]) -> str:
    """Replace the q, k and v products of an attention by one. Returns the name of the initializer
    with its integers."""
    graph, module = model.graph, module_of(attention)
    weights = [n for p in products if (n := find_maker(p.inputs[1], "DequantizeLinear"))]
    operands = []
    for i, name in enumerate(NAMES[: len(weights[0].inputs)]):
        parts = [t for w in weights if (t := _tensor(w.inputs[i])) is not None]
        operands.append(_add(graph, f"{module}.qkv_{name}", partial(_side_by_side, parts), parts))
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
    """Divide packed q, k and v products of a lowered graph again, in place."""
    graph = model.graph
    for packed in [n for n in graph if PARTS in n.metadata_props]:
        weight = find_maker(packed.inputs[1], "DequantizeLinear")
        attention = next(iter(packed.outputs[0].uses()))[0]
        assert weight is not None
        start = 0
        for i, part in enumerate(json.loads(packed.metadata_props[PARTS])):
            columns = slice(start, start := start + part["columns"])
            operands = [
                _add(graph, name, partial(_cut, t, columns), [t], part["columns"])
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


def _add(
    graph: ir.Graph,
    name: str,
    read: Callable[[], ir.TensorProtocol],
    parts: Sequence[ir.TensorProtocol],
    columns: int | None = None,
) -> ir.Value:
    """Add an initializer to the lowered graph that joins `parts` along their columns.

    read: function that computes it whenever it is used, so that the weights of one layer are in
        memory at a time
    columns: columns of the result; None for those of all parts
    """
    rows, dtype = parts[0].shape.numpy()[:-1], parts[0].dtype
    last = sum(t.shape.numpy()[-1] for t in parts) if columns is None else columns
    tensor = ir.LazyTensor(read, dtype, ir.Shape((*rows, last)), name=name)
    value = ir.val(name, dtype, tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def _side_by_side(parts: Sequence[ir.TensorProtocol]) -> ir.TensorProtocol:
    return ir.tensor(np.concatenate([t.numpy() for t in parts], axis=-1))


def _cut(packed: ir.TensorProtocol, columns: slice) -> ir.TensorProtocol:
    part = ir.tensor(np.ascontiguousarray(packed.numpy()[..., columns]))
    if isinstance(packed, ir.ExternalTensor):
        packed.release()
    return part


def _columns(weight: ir.Node) -> int:
    integers = _tensor(weight.inputs[0])
    assert integers is not None
    return int(integers.shape[1])


def _tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    return value.const_value if value is not None else None


def _remove(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    """Remove these nodes from the lowered graph, and the initializers that only they used."""
    initializers = [v for n in nodes for v in n.inputs if v is not None and v.is_initializer()]
    graph.remove(list(nodes), safe=True)
    for value in initializers:
        if not list(value.uses()) and value.name in graph.initializers:
            del graph.initializers[str(value.name)]
