"""From the exporter's graph to one that is short, stable and named as the checkpoint.

Passes, in order:
 1. rename      initializers get their parameter's own name (the wrapper's prefix goes)
 2. fold        constants are folded and dead nodes removed; parameters are inputs meanwhile
 3. weights     2-D weights are laid out [K, N]:
      3.1 MatMul(x, Transpose(W))                W is stored transposed, same name
      3.2 Gemm(x, W, b, transB=1)                becomes MatMul(x, W stored transposed) + b
      3.3 W is used by anything else as well     the Transpose stays (a tied embedding)
 4. cache       its shape is asked of the first block's, whichever the exporter asked
 5. shapes      see shapes.py
 6. mean square x * Reciprocal(Sqrt(v)) becomes x / Sqrt(v): the form that ONNX Runtime fuses to
                SimplifiedLayerNormalization
 7. mask        the attention mask's gather over all positions becomes Unsqueeze:
      7.1 GatherND(mask, (every batch row, every position))  ->  Unsqueeze(mask, [1, 2])
      7.2 And(true, m) -> m, where true is a constant or Range(0, ..) >= 0
 8. names       nodes and values are named "<module>/<operator>"; node metadata keeps only
                "module"; the shapes of inner values are dropped: some are stale by now, and
                without them ONNX Runtime does not merge residual adds into its
                SkipLayerNormalization, which is slower (measured, 1.31) than the two apart
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from torch import Tensor

from optimizer.export.onnx_from_torch import WRAPPED, quiet
from optimizer.export.passes.shapes import simplify_shapes
from optimizer.export.weights import Stored, hidden
from optimizer.harness.inputs.kv_cache import is_past

SCOPES = "pkg.torch.onnx.name_scopes"
MODULE = "module"


def clean(model: ir.Model, values: Mapping[str, Tensor], first: Mapping[str, str]) -> ir.Model:
    """Run the passes above on `model`, in place, and return it.

    values: every parameter's value, read when the graph is written; first: the first name of
    each, which a tied parameter's initializer gets.
    """
    kept = rename(model, first)
    with hidden(model, values):
        fold(model)
    lay_out_weights(model)
    one_cache_length(model)
    simplify_shapes(model)
    divide_by_root(model)
    simplify_mask(model)
    remove_dead(model)
    name_everything(model, kept)
    return model


def rename(model: ir.Model, first: Mapping[str, str]) -> set[str]:
    """Pass 1. Returns the names of parameters and buffers; other initializers are constants."""
    kept = set()
    for value in list(model.graph.initializers.values()):
        assert value.name is not None
        if value.name.startswith(f"{WRAPPED}."):
            name = value.name.removeprefix(f"{WRAPPED}.")
            value.name = first.get(name, name)
            kept.add(value.name)
    return kept


def fold(model: ir.Model) -> None:
    """Pass 2."""
    import onnxscript.optimizer

    with quiet():
        onnxscript.optimizer.optimize_ir(model)
    for node in model.graph:  # what a fusion made has no scope: it gets that of its first user
        users = [user for value in node.outputs for user, _ in value.uses()]
        if SCOPES not in node.metadata_props and users:
            node.metadata_props[SCOPES] = users[0].metadata_props.get(SCOPES, "['']")


def one_cache_length(model: ir.Model) -> None:
    """Pass 4. The tracer asks whichever block's cache it met last; all are of one length."""
    caches = [v for v in model.graph.inputs if is_past(str(v.name))]
    for value in caches[1:]:
        for user, i in list(value.uses()):
            if user.op_type == "Shape":
                user.replace_input_with(i, caches[0])


def lay_out_weights(model: ir.Model) -> None:
    """Pass 3."""
    for weight in list(model.graph.initializers.values()):
        if weight.shape is None or len(weight.shape) != 2:
            continue
        users = [node for node, _ in weight.uses()]
        if users and all(_is_transpose(n) for n in users):  # 3.1, and 3.3 when not all are
            _store_transposed(weight)
            for node in users:
                ir.convenience.replace_all_uses_with(node.outputs[0], weight)
                model.graph.remove(node, safe=True)
        elif users and all(_is_linear_gemm(n, weight) for n in users):  # 3.2
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
    """Replace an initializer's value by its transpose, made when it is written."""
    tensor = weight.const_value
    assert tensor is not None
    if isinstance(tensor, Stored):
        weight.const_value = tensor.turned()
    else:
        weight.const_value = ir.tensor(np.ascontiguousarray(tensor.numpy().T), name=weight.name)
    weight.shape = ir.Shape(weight.const_value.shape.numpy())


def divide_by_root(model: ir.Model) -> None:
    """Pass 6."""
    for node in list(model.graph):
        if node.op_type != "Mul":
            continue
        for x, inverse in (node.inputs, tuple(reversed(node.inputs))):
            reciprocal = inverse.producer() if inverse is not None else None
            if reciprocal is None or reciprocal.op_type != "Reciprocal":
                continue
            root = reciprocal.inputs[0]
            if root is None or (p := root.producer()) is None or p.op_type != "Sqrt":
                continue
            divided = ir.node("Div", [x, root], metadata_props=dict(node.metadata_props))
            ir.convenience.replace_nodes_and_values(
                model.graph, node, [node], [divided], node.outputs, divided.outputs
            )
            break


def simplify_mask(model: ir.Model) -> None:
    """Pass 7. What it assumes of the indices is checked by the stage against torch."""
    for node in list(model.graph):
        if node.op_type == "GatherND" and _gathers_everything(node):
            axes = ir.val("mask_axes", const_value=ir.tensor(np.array([1, 2]), name="mask_axes"))
            model.graph.initializers.setdefault("mask_axes", axes)
            wider = ir.node(
                "Unsqueeze",
                [node.inputs[0], model.graph.initializers["mask_axes"]],
                metadata_props=dict(node.metadata_props),
            )
            ir.convenience.replace_nodes_and_values(
                model.graph, node, [node], [wider], node.outputs, wider.outputs
            )
        elif node.op_type == "And" and node.inputs[0] is not None and _always_true(node.inputs[0]):
            assert node.inputs[1] is not None
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[1])


def _gathers_everything(node: ir.Node) -> bool:
    """Case 7.1: a 2-D mask indexed by Concat of two indices that are both a Range from 0."""
    concat = node.inputs[1].producer() if node.inputs[1] is not None else None
    data = node.inputs[0]
    if concat is None or concat.op_type != "Concat" or data is None or len(concat.inputs) != 2:
        return False
    return all(_is_range_from_zero(i) for i in concat.inputs)


def _is_range_from_zero(value: ir.Value | None) -> bool:
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Range":
            start, _, step = node.inputs
            return _constant(start) == 0 and _constant(step) == 1
        if node.op_type not in ("Unsqueeze", "Expand", "Cast", "Identity"):
            return False
        value = node.inputs[0]
    return False


def _always_true(value: ir.Value) -> bool:
    """Case 7.2. Dropping it is sound where it does not widen the other operand."""
    node = value.producer()
    if node is None:
        return bool(_constant(value))
    if node.op_type == "And":
        return all(i is not None and _always_true(i) for i in node.inputs)
    if node.op_type == "GreaterOrEqual":
        return _is_range_from_zero(node.inputs[0]) and _constant(node.inputs[1]) == 0
    return False


def _constant(value: ir.Value | None) -> float | bool | None:
    """The one number of a constant, or None."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    item: float | bool = value.const_value.numpy().reshape(()).item()
    return item


def remove_dead(model: ir.Model) -> None:
    """Nodes and initializers that reach no output go."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    RemoveUnusedNodesPass()(model)


def name_everything(model: ir.Model, kept: set[str]) -> None:
    """Pass 8. The names depend on the graph alone, so two exports give the same bytes.

    kept: initializers that have their name already; the others become "constant_<n>".
    """
    graph = model.graph
    fixed = {*graph.inputs, *graph.outputs, *graph.initializers.values()}
    counts: dict[str, int] = {}
    constants = {v: i for i, v in enumerate(_constants(graph, kept))}
    for value, i in constants.items():
        value.name = f"constant_{i}"
    for node in graph:
        module = module_of(node)
        base = f"{module}/{node.op_type}" if module else node.op_type
        seen = counts[base] = counts.get(base, -1) + 1
        node.name = f"{base}_{seen}" if seen else base
        node.metadata_props.clear()
        node.metadata_props[MODULE] = module
        for i, value in enumerate(node.outputs):
            if value not in fixed:
                value.name = f"{node.name}:{i}"
                value.shape = value.type = None
            value.metadata_props.clear()
    for value in fixed:
        value.metadata_props.clear()
    graph.metadata_props.clear()
    model.metadata_props.clear()
    graph.name, graph.doc_string, model.doc_string = "main", None, None


def _constants(graph: ir.Graph, kept: set[str]) -> list[ir.Value]:
    """Initializers not in `kept`, in the order in which nodes first use them."""
    used = [v for node in graph for v in node.inputs if v is not None and v.is_initializer()]
    return [v for v in dict.fromkeys(used) if v.name not in kept]


def module_of(node: ir.Node) -> str:
    """The module a node came from, as the checkpoint names it, or "" at the top.

    Read from the exporter's scopes (a list from the root to the operator) or, once named, from
    the node's own metadata.
    """
    if MODULE in node.metadata_props:
        return str(node.metadata_props[MODULE])
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "['']"))
    path = str(scopes[-2]) if len(scopes) > 1 else ""
    inside = path == WRAPPED or path.startswith(f"{WRAPPED}.")
    return path.removeprefix(WRAPPED).removeprefix(".") if inside else ""
