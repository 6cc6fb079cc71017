"""How long the cache is, without reading its shape.

Past and present may be one buffer of the longest length (ort_attention.py), so the shape of
past_key_values.<i>.key no longer says how many tokens came before; of a model with learned
positions (OPT) something still asks it. What is asked is counted instead:

 1. Shape(past, start=2, end=3)   becomes columns of attention_mask - columns of input_ids
 2. Shape(past, start=0, end=1 or 2)   rows and heads: the same in any buffer, left as it is
 3. any other reading of past outside the attentions: the buffer cannot be shared
"""

from __future__ import annotations

import onnx_ir as ir

from optimizer.export.clean import MODULE
from optimizer.harness.kv_cache import is_past


def count(model: ir.Model) -> list[str]:
    """Rewrite case 1 in place; returns the names of the nodes of case 3."""
    inputs = {str(v.name): v for v in model.graph.inputs}
    others, counted = [], None
    for name, past in inputs.items():
        if not is_past(name):
            continue
        for node, _ in list(past.uses()):
            first, last = _ends(node)
            if node.op_type == "GroupQueryAttention" or (first == 0 and last in (1, 2)):
                continue
            if (first, last) != (2, 3):
                others.append(str(node.name))
                continue
            if counted is None:
                counted = _counted(model, inputs["attention_mask"], inputs["input_ids"])
            for user, index in list(node.outputs[0].uses()):
                user.replace_input_with(index, counted)
            model.graph.remove(node, safe=True)
    return others


def _ends(node: ir.Node) -> tuple[int, int | None]:
    """(start, end) of a Shape; (-1, None) of any other operator."""
    if node.op_type != "Shape":
        return -1, None
    start, end = node.attributes.get("start"), node.attributes.get("end")
    return 0 if start is None else start.as_int(), None if end is None else end.as_int()


def _counted(model: ir.Model, mask: ir.Value, ids: ir.Value) -> ir.Value:
    first, nodes = model.graph[0], []
    for name, value in (("columns", mask), ("new", ids)):
        sizes = ir.node("Shape", [value], {"start": 1, "end": 2}, name=f"past_length/{name}")
        nodes.append(sizes)
    nodes.append(ir.node("Sub", [n.outputs[0] for n in nodes], name="past_length"))
    for node in nodes:
        node.metadata_props[MODULE] = ""
        node.outputs[0].name, node.outputs[0].dtype = node.name, ir.DataType.INT64
        node.outputs[0].shape = ir.Shape([1])
        model.graph.insert_before(first, node)
    return nodes[-1].outputs[0]
