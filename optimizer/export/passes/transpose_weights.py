"""Lay out 2-D weights as [K, N].

1. MatMul(x, Transpose(W))                W is stored transposed, same name
2. Gemm(x, W, b, transB=1)                becomes MatMul(x, W stored transposed) + b
3. W is used by anything else as well     the Transpose stays (a tied embedding)
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimizer.export.weights import StoredInitializer


def transpose_weights(model: ir.Model) -> None:
    """Store the 2-D weights of MatMul and Gemm in an exported graph in the layout [in, out] that
    MatMul reads, in place, so that no Transpose runs (cases 1 and 2)."""
    for weight in list(model.graph.initializers.values()):
        if weight.shape is None or len(weight.shape) != 2:
            continue
        users = [node for node, _ in weight.uses()]
        if users and all(_is_transpose(n) for n in users):  # 1, and 3 when not all are
            _store_transposed(weight)
            for node in users:
                ir.convenience.replace_all_uses_with(node.outputs[0], weight)
                model.graph.remove(node, safe=True)
        elif users and all(_is_linear_gemm(n, weight) for n in users):  # 2
            _store_transposed(weight)
            for node in users:
                _gemm_to_matmul(model, node)


def _is_transpose(node: ir.Node) -> bool:
    perm = node.attributes.get("perm")
    return node.op_type == "Transpose" and (perm is None or tuple(perm.as_ints()) == (1, 0))


def _is_linear_gemm(node: ir.Node, weight: ir.Value) -> bool:
    get = {k: a.value for k, a in node.attributes.items()}
    return (
        node.op_type == "Gemm"
        and node.inputs[1] is weight
        and weight not in (node.inputs[0], *node.inputs[2:])
        and get.get("transB", 0) == 1
        and get.get("transA", 0) == 0
        and get.get("alpha", 1.0) == 1.0
        and get.get("beta", 1.0) == 1.0
    )


def _gemm_to_matmul(model: ir.Model, node: ir.Node) -> None:
    product = ir.node("MatMul", node.inputs[:2], metadata_props=dict(node.metadata_props))
    result = product.outputs[0]
    replacements = [product]
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        added = ir.node("Add", [result, node.inputs[2]], metadata_props=dict(node.metadata_props))
        result = added.outputs[0]
        replacements.append(added)
    ir.convenience.replace_nodes_and_values(
        model.graph, node, [node], replacements, [node.outputs[0]], [result]
    )


def _store_transposed(weight: ir.Value) -> None:
    """Replace an exported graph's initializer by its transpose, computed when it is written."""
    tensor = weight.const_value
    assert tensor is not None
    if isinstance(tensor, StoredInitializer):
        weight.const_value = tensor.transpose()
    else:
        weight.const_value = ir.tensor(np.ascontiguousarray(tensor.numpy().T), name=weight.name)
    weight.shape = ir.Shape(weight.const_value.shape.numpy())


def is_transposed(model: ir.Model) -> bool:
    """Test that the exported graph has no 2-D initializer left that `transpose_weights` would store
    transposed."""
    weights = [v for v in model.graph.initializers.values() if v.shape and len(v.shape) == 2]
    readers = [(w, [node for node, _ in w.uses()]) for w in weights]
    return not any(
        nodes and (all(map(_is_transpose, nodes)) or all(_is_linear_gemm(n, w) for n in nodes))
        for w, nodes in readers
    )
