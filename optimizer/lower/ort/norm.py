"""Fuse RMS norms of a decoder with the residual sum before them.

    s = a + b;  s / sqrt(mean(s^2) + eps) * w       where a and b are the residual stream's

becomes SkipSimplifiedLayerNormalization, which computes sum and norm. In half precision a Cast to
float32 follows the sum, and one back the division; the operator computes in float32 itself. ONNX
Runtime turns other norms of this pattern (the first of the model, of heads) into
SimplifiedLayerNormalization.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from optimizer.export.scopes import MODULE, module_of
from optimizer.lower.onnx.examine import find_maker, find_only_user, read_constant, take_over

DOMAIN = "com.microsoft"


@dataclass(frozen=True)
class _ResidualNorm:
    """An RMS norm of the graph that is lowered, behind a residual sum: total / root * weight."""

    total: ir.Node
    weight: ir.Value
    epsilon: float
    output: ir.Value


def fuse(model: ir.Model) -> tuple[str, ...]:
    """Fuse RMS norms with the residual sums before them for ONNX Runtime, in place. Returns the
    modules of the norms."""
    done = []
    for node in list(model.graph):
        norm = _norm(node) if node.op_type == "Div" else None
        if norm is not None:
            done.append(module_of(node))
            _rewrite(model, norm, done[-1])
    if done:
        model.opset_imports[DOMAIN] = 1
    RemoveUnusedNodesPass()(model)
    model.graph.sort()
    return tuple(done)


def _norm(divided: ir.Node) -> _ResidualNorm | None:
    """Recognise in the graph that is lowered the norm whose division by the root is the Div
    `divided`; None for other nodes."""
    x, root = divided.inputs
    normalized = divided.outputs[0]
    narrowed = find_only_user(normalized)
    if narrowed is not None and narrowed.op_type == "Cast":
        normalized = narrowed.outputs[0]
    scaled = find_only_user(normalized)
    shifted = find_maker(_input(find_maker(root, "Sqrt")), "Add")
    mean = find_maker(_input(shifted), "ReduceMean")
    power = find_maker(_input(mean), "Pow")
    total = find_maker(x, "Add") or find_maker(_input(find_maker(x, "Cast")), "Add")
    if scaled is None or scaled.op_type != "Mul" or shifted is None or mean is None:
        return None
    if total is None or any(v is None or v.is_initializer() for v in total.inputs):
        return None
    weight = next((v for v in scaled.inputs if v is not normalized), None)
    epsilon = read_constant(shifted.inputs[1])
    usual = (
        power is not None
        and power.inputs[0] is x
        and read_constant(power.inputs[1]) == [2]
        and read_constant(mean.inputs[1]) == [-1]
    )
    if not usual or weight is None or not weight.is_initializer() or epsilon is None:
        return None
    if weight.shape is None or len(weight.shape) != 1 or len(epsilon) != 1:
        return None
    return _ResidualNorm(total, weight, float(epsilon[0]), scaled.outputs[0])


def _input(node: ir.Node | None) -> ir.Value | None:
    return node.inputs[0] if node is not None else None


def _rewrite(model: ir.Model, norm: _ResidualNorm, module: str) -> None:
    """Replace a norm and the sum before it by SkipSimplifiedLayerNormalization."""
    node = ir.node(
        "SkipSimplifiedLayerNormalization",
        [*norm.total.inputs, norm.weight],
        {"epsilon": norm.epsilon},
        domain=DOMAIN,
        num_outputs=4,
        name=f"{module}/SkipSimplifiedLayerNormalization",
        metadata_props={MODULE: module},
    )
    node.outputs[1].name = node.outputs[2].name = ""  # mean and deviation, not computed
    model.graph.insert_before(norm.total, node)
    take_over(norm.output, node.outputs[0])
    take_over(norm.total.outputs[0], node.outputs[3])
    kind = norm.weight.dtype
    if kind is not None and kind != ir.DataType.FLOAT:  # which onnx takes where it infers no type
        for output in (node.outputs[0], node.outputs[3]):
            output.type = ir.TensorType(kind)
