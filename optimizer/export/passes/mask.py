"""Replace the attention mask's gather over all positions by Unsqueeze.

1. GatherND(mask, (every batch row, every position))  ->  Unsqueeze(mask, [1, 2])
2. And(true, m) -> m, where true is a constant or Range(0, ..) >= 0
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def simplify_mask(model: ir.Model) -> None:
    """Simplify an exported graph: replace the attention mask's gather over all positions by an
    Unsqueeze, and remove an And with true, in place. The stage checks the result against torch."""
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
    """Test for case 1 in an exported graph: the GatherND's indices are a Concat of two values that
    are Ranges from 0."""
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
    """Test that `value`, an operand of And in an exported graph, is always true. Dropping it must
    not widen And's other operand."""
    node = value.producer()
    if node is None:
        return bool(_constant(value))
    if node.op_type == "And":
        return all(i is not None and _always_true(i) for i in node.inputs)
    if node.op_type == "GreaterOrEqual":
        return _is_range_from_zero(node.inputs[0]) and _constant(node.inputs[1]) == 0
    return False


def _constant(value: ir.Value | None) -> float | bool | None:
    """Return the one number of a constant of the exported graph, or None."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    item: float | bool = value.const_value.numpy().reshape(()).item()
    return item
