"""Split the transpose of keys in two steps: heads first, then the last two axes.

    Transpose(0, 2, 3, 1)  ->  Transpose(0, 2, 1, 3), Transpose(0, 1, 3, 2)

before the second operand of a product. OpenVINO's products read a matrix with swapped last axes in
place, so it only copies full rows; a single transpose copies number by number
(docs/decisions/0015). Values do not change. Other transposes stay as they are.
"""

from __future__ import annotations

import onnx_ir as ir

from optimizer.export.scopes import MODULE, module_of
from optimizer.lower.onnx.attention_pattern import get_perm
from optimizer.lower.onnx.examine import take_over


def split(model: ir.Model) -> tuple[str, ...]:
    """Split the transposes of keys in `model` into two, in place, which OpenVINO runs without
    copying single numbers. Returns the modules of the transposes."""
    done = []
    for node in list(model.graph):
        if node.op_type == "Transpose" and _of_columns(node) and _for_a_product(node):
            done.append(module_of(node))
            _rewrite(model, node)
    return tuple(done)


def _of_columns(node: ir.Node) -> bool:
    """Test that a Transpose of the lowered graph moves the innermost axis to the last place but
    one."""
    perm = get_perm(node)
    return len(perm) > 2 and perm[-2] == len(perm) - 1 and perm[-1] != len(perm) - 2


def _for_a_product(node: ir.Node) -> bool:
    uses = list(node.outputs[0].uses())
    return bool(uses) and all(user.op_type == "MatMul" and place == 1 for user, place in uses)


def _rewrite(model: ir.Model, node: ir.Node) -> None:
    """Replace one Transpose of the lowered graph by the two steps; the second takes its output's
    name and readers."""
    perm = get_perm(node)
    axes = range(len(perm))
    rows = (*perm[:-2], perm[-1], perm[-2])
    swapped = (*axes[:-2], axes[-1], axes[-2])
    value = node.inputs[0]
    for step, order in (("rows", rows), ("columns", swapped)):
        transpose = ir.node(
            "Transpose",
            [value],
            {"perm": order},
            name=f"{node.name}/{step}",
            metadata_props={MODULE: module_of(node)},
        )
        transpose.outputs[0].name = f"{node.outputs[0].name}/{step}"
        model.graph.insert_before(node, transpose)
        value = transpose.outputs[0]
    take_over(node.outputs[0], value)
    model.graph.remove(node, safe=True)
