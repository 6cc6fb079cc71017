"""Replace x * Reciprocal(Sqrt(v)) by x / Sqrt(v).

ONNX Runtime fuses this pattern to SimplifiedLayerNormalization.
"""

from __future__ import annotations

import onnx_ir as ir


def divide_by_root(model: ir.Model) -> None:
    """Simplify an exported graph: replace each product x * Reciprocal(Sqrt(v)) by the division x /
    Sqrt(v), in place."""
    for node in list(model.graph):
        factors = _factors(node)
        if factors is None:
            continue
        divided = ir.node("Div", factors, metadata_props=dict(node.metadata_props))
        ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], [divided], node.outputs, divided.outputs
        )


def divides_by_root(model: ir.Model) -> bool:
    """Test that the exported graph has no x * Reciprocal(Sqrt(v)) left."""
    return not any(map(_factors, model.graph))


def _factors(node: ir.Node) -> tuple[ir.Value | None, ir.Value] | None:
    """Find the product x * Reciprocal(Sqrt(v)) in an exported graph: (x, Sqrt(v)), or None."""
    for x, inverse in (node.inputs, node.inputs[::-1]) if node.op_type == "Mul" else ():
        reciprocal = inverse.producer() if inverse is not None else None
        root = reciprocal.inputs[0] if reciprocal and reciprocal.op_type == "Reciprocal" else None
        if root is not None and (p := root.producer()) is not None and p.op_type == "Sqrt":
            return x, root
    return None
