"""RMS norms of a decoder in the form ONNX Runtime's CPU provider runs as one operator.

1. s = a + b; s / sqrt(mean(s^2) + eps) * w, where a and b are tensors of the same residual stream
     SkipSimplifiedLayerNormalization, which gives the sum and the norm at once
2. x * reciprocal(sqrt(..)), of any other norm
     x / sqrt(..), which ONNX Runtime turns into SimplifiedLayerNormalization by itself; the
     product with a reciprocal, which is what torch exports, it leaves as seven operators
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from optimizer.export.clean import MODULE, module_of
from optimizer.lower.examine import constant, maker, only_user

DOMAIN = "com.microsoft"


@dataclass(frozen=True)
class _Norm:
    """x * reciprocal(root) * weight. product: the first multiplication; output: of the last."""

    x: ir.Value
    root: ir.Value
    product: ir.Node
    weight: ir.Value
    epsilon: float
    output: ir.Value


def fuse(model: ir.Model) -> tuple[str, ...]:
    """Rewrite `model` in place. Returns the modules of the norms that became case 1."""
    done = []
    for node in list(model.graph):
        norm = _norm(node) if node.op_type == "Mul" else None
        if norm is None:
            continue
        total = maker(norm.x, "Add")
        if total is not None and not any(v is None or v.is_initializer() for v in total.inputs):
            _with_sum(model, norm, total)
            done.append(module_of(node))
        else:
            divided = ir.node("Div", [norm.x, norm.root], name=node.name)
            divided.metadata_props[MODULE] = module_of(node)
            _replace(model, node, divided, {node.outputs[0]: divided.outputs[0]})
    _tidy(model, bool(done))
    return tuple(done)


def _norm(product: ir.Node) -> _Norm | None:
    """The norm whose multiplication by the reciprocal is `product`."""
    pairs = [tuple(product.inputs), tuple(product.inputs)[::-1]]
    x, inverse = next(((a, b) for a, b in pairs if maker(b, "Reciprocal")), (None, None))
    scaled = only_user(product.outputs[0])
    if x is None or inverse is None or scaled is None or scaled.op_type != "Mul":
        return None
    root = _input(maker(inverse, "Reciprocal"))
    shifted = maker(_input(maker(root, "Sqrt")), "Add")
    if shifted is None or root is None:
        return None
    mean = maker(shifted.inputs[0], "ReduceMean")
    power = maker(_input(mean), "Pow")
    weight = next((v for v in scaled.inputs if v is not product.outputs[0]), None)
    epsilon = constant(shifted.inputs[1])
    if mean is None or power is None or weight is None or epsilon is None:
        return None
    usual = (
        power.inputs[0] is x
        and constant(power.inputs[1]) == [2]
        and constant(mean.inputs[1]) == [-1]
        and len(epsilon) == 1
        and weight.is_initializer()
        and weight.shape is not None
        and len(weight.shape) == 1
    )
    if not usual:
        return None
    return _Norm(x, root, product, weight, float(epsilon[0]), scaled.outputs[0])


def _input(node: ir.Node | None) -> ir.Value | None:
    return node.inputs[0] if node is not None else None


def _with_sum(model: ir.Model, norm: _Norm, total: ir.Node) -> None:
    """Case 1."""
    module = module_of(norm.product)
    node = ir.node(
        "SkipSimplifiedLayerNormalization",
        [*total.inputs, norm.weight],
        {"epsilon": norm.epsilon},
        domain=DOMAIN,
        num_outputs=4,
        name=f"{module}/SkipSimplifiedLayerNormalization",
        metadata_props={MODULE: module},
    )
    node.outputs[1].name = node.outputs[2].name = ""  # mean and deviation: not wanted
    taken = {norm.output: node.outputs[0], norm.x: node.outputs[3]}
    _replace(model, total, node, taken)


def _replace(
    model: ir.Model, place: ir.Node, node: ir.Node, values: dict[ir.Value, ir.Value]
) -> None:
    """Put `node` at `place`; its outputs get the names and uses of those they stand for."""
    model.graph.insert_before(place, node)
    for old, new in values.items():
        name, new.type, new.shape = old.name, old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name, new.name = None, name


def _tidy(model: ir.Model, own: bool) -> None:
    """Remove what nothing uses any more; put nodes in order."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    if own:
        model.opset_imports[DOMAIN] = 1
    RemoveUnusedNodesPass()(model)
    model.graph.sort()
