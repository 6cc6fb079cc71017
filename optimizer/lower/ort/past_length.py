"""Compute the past length of each row without the KV cache's shape.

Past and present may share a buffer of the maximum length (attention.py), and a row may be shorter
than its batch (its case 8), so the shape of past_key_values.<i>.key is not the past length. Models
with learned positions (OPT) read it. Readers of the shape:

 1. Slice(x, Shape(past, start=2, end=3), all that follows, axis 1), x of attention_mask's shape:
    becomes the columns of each row's new tokens, where GroupQueryAttention puts them: up to the
    row's last 1, in the number of columns of input_ids
 2. Shape(past, start=0, end=1 or 2)   rows and heads, equal in any buffer: unchanged
 3. others outside the attentions      the buffer cannot be shared

An example tests that a row of x depends neither on other rows nor on columns after its last 1;
otherwise it is case 3.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimizer.export.scopes import MODULE
from optimizer.harness.inputs.kv_cache import is_past
from optimizer.lower.onnx.examine import (
    DecoderExamples,
    add_initializer,
    evaluate,
    read_constant,
    take_over,
)

LENGTHS = 5  # index of GroupQueryAttention's input with each row's last column
EXAMPLE = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0]])  # padding on either side


def measure_by_row(model: ir.Model) -> list[str]:
    """Compute past lengths in a lowered graph row by row instead of from the KV cache's shape (case
    1), in place, in a model whose attentions are all GroupQueryAttention. Returns the names of
    nodes that still read the shape (case 3)."""
    others = []
    for past in [v for v in model.graph.inputs if is_past(str(v.name))]:
        for node, _ in list(past.uses()):
            first, last = _ends(node)
            if node.op_type == "GroupQueryAttention" or (first == 0 and last in (1, 2)):
                continue
            if (first, last) != (2, 3):
                others.append(str(node.name))
                continue
            for user, _ in list(node.outputs[0].uses()):
                if _keeps_new_columns(model, user, node.outputs[0]):
                    _take_rows_own(model, user)
                else:
                    others.append(str(user.name))
            if not node.outputs[0].uses():
                model.graph.remove(node, safe=True)
    model.graph.sort()
    return others


def _ends(node: ir.Node) -> tuple[int, int | None]:
    """Return (start, end), the axes that a Shape node of the lowered graph reads; (-1, None) for
    another operator."""
    if node.op_type != "Shape":
        return -1, None
    start, end = node.attributes.get("start"), node.attributes.get("end")
    return 0 if start is None else start.as_int(), None if end is None else end.as_int()


def _keeps_new_columns(model: ir.Model, node: ir.Node, length: ir.Value) -> bool:
    """Test that `node` of the lowered graph is a Slice that keeps the columns of the new tokens
    (case 1), and by an example that each row depends on itself alone."""
    if node.op_type != "Slice" or node.inputs[1] is not length or node.inputs[0] is None:
        return False
    ends, axes, *steps = [read_constant(v) for v in node.inputs[2:5]]
    if ends is None or ends[0] < np.iinfo(np.int32).max or axes != [1] or steps not in ([], [[1]]):
        return False
    together = evaluate(model, node.inputs[0], DecoderExamples(model, EXAMPLE, 0))
    if together.shape != EXAMPLE.shape:
        return False
    ends_at = [int(np.flatnonzero(row)[-1]) + 1 for row in EXAMPLE]
    return all(
        np.array_equal(
            evaluate(model, node.inputs[0], DecoderExamples(model, EXAMPLE[[i], :end], 0))[0],
            together[i, :end],
        )
        for i, end in enumerate(ends_at)
    )


def _take_rows_own(model: ir.Model, node: ir.Node) -> None:
    """Replace the Slice that keeps the new tokens' columns (case 1) by a GatherElements that takes
    them from each row at its own length."""
    name = f"{node.name}/row"
    attention = next(n for n in model.graph if n.op_type == "GroupQueryAttention")
    ids = next(v for v in model.graph.inputs if v.name == "input_ids")

    def add(op: str, inputs: list[ir.Value | None], what: str, /, **attributes: int) -> ir.Value:
        added = ir.node(op, inputs, attributes, name=f"{name}_{what}")
        added.metadata_props[MODULE] = node.metadata_props.get(MODULE, "")
        added.outputs[0].name, added.outputs[0].dtype = added.name, ir.DataType.INT64
        model.graph.insert_before(node, added)
        return added.outputs[0]

    def number(value: list[int] | int, what: str) -> ir.Value:
        return add_initializer(model.graph, f"{name}_{what}", np.array(value, np.int64))

    one, zero = number(1, "one"), number(0, "zero")
    last = add("Cast", [attention.inputs[LENGTHS]], "lasts", to=int(ir.DataType.INT64))
    length = add("Add", [add("Unsqueeze", [last, number([1], "axis")], "last"), one], "length")
    new = add("Squeeze", [add("Shape", [ids], "columns", start=1, end=2)], "new")
    # a first prompt padded on the right has more columns than the row has tokens
    start = add("Max", [add("Sub", [length, new], "before"), zero], "start")
    columns = add("Add", [start, add("Range", [zero, new, one], "numbers")], "own_columns")
    new_columns = add("GatherElements", [node.inputs[0], columns], "kept", axis=1)
    take_over(node.outputs[0], new_columns)
    model.graph.remove(node, safe=True)
