"""Plant faults in a decoder's graph ("graph": the float one, "model": the lowered one)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.validate.ledger.faults.mutations import edit_onnx, tensor, values
from tests.validate.runs import Run

KEY, VALUE = "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"
DOWN = "model.layers.1.mlp.down_proj"
TABLE = "model.embed_tokens"
Edit = Callable[[Any], None]
Change = Callable[[onnx.GraphProto], None]


def made_by(graph: onnx.GraphProto, value: str) -> onnx.NodeProto:
    return next(n for n in graph.node if value in n.output)


def inserted(
    graph: onnx.GraphProto, value: str, op: str, *more: np.ndarray[Any, Any], **attributes: Any
) -> None:
    """Put op(value, *more) in the place of `value` for all its readers."""
    names = []
    for i, array in enumerate(more):
        names.append(f"{value}/fault_{i}")
        graph.initializer.append(numpy_helper.from_array(array, names[-1]))
    readers = [n for n in graph.node if value in n.input]
    changed = f"{value}/fault"
    for node in readers:
        for i, name in enumerate(node.input):
            if name == value:
                node.input[i] = changed
    node = helper.make_node(op, [value, *names], [changed], name=changed, **attributes)
    graph.node.insert(list(graph.node).index(readers[0]), node)


def returned_instead(graph: onnx.GraphProto, present: str, other: str) -> None:
    """Return `other` under the name `present`; the graph computes as before."""
    for node in graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == present:
                    names[i] = "the_right_one"
    graph.node.append(helper.make_node("Identity", [other], [present]))


def read_instead(graph: onnx.GraphProto, layer: int, names: dict[str, str]) -> None:
    """Give other inputs to the nodes that make the layer's KV cache."""
    for kind in ("key", "value"):
        node = made_by(graph, f"present.{layer}.{kind}")
        for i, name in enumerate(node.input):
            node.input[i] = names.get(name, name)
        if node.op_type == "GroupQueryAttention":
            return  # it makes both


def stale(graph: onnx.GraphProto) -> None:
    returned_instead(graph, "present.0.key", "past_key_values.0.key")


def past_of_another_layer(graph: onnx.GraphProto) -> None:
    """Read another layer's KV cache, which only a continuation shows."""
    read_instead(graph, 1, {"past_key_values.1.key": "past_key_values.0.key"})


def present_of_another_layer(graph: onnx.GraphProto) -> None:
    returned_instead(graph, "present.1.value", "present.0.value")


def past_keys_as_values(graph: onnx.GraphProto) -> None:
    key, value = "past_key_values.0.key", "past_key_values.0.value"
    read_instead(graph, 0, {key: value, value: key})


def other_scale(graph: onnx.GraphProto) -> None:
    found = next(n for n in graph.node if n.op_type == "GroupQueryAttention")
    next(a for a in found.attribute if a.name == "scale").f *= 1.1


def other_angles(graph: onnx.GraphProto) -> None:
    """Give every position the angles of the next one."""
    for name in ("rotary_cos", "rotary_sin"):
        table = tensor(graph, name)
        rolled = np.roll(numpy_helper.to_array(table), -1, 0)
        table.CopyFrom(numpy_helper.from_array(rolled, name))


def padding_seen(graph: onnx.GraphProto) -> None:
    inserted(graph, "attention_mask", "Max", np.array(1, np.int64))


def position_off_by_one(graph: onnx.GraphProto) -> None:
    inserted(graph, "position_ids", "Add", np.array(1, np.int64))


def other_heads(graph: onnx.GraphProto) -> None:
    """Exchange keys and values of the query heads 1 and 2 of four: tiled, not repeated."""
    for kind in ("key", "value"):
        repeated = next(n for n in graph.node if f"present.0.{kind}" in n.input)
        while repeated.op_type != "Reshape":
            repeated = next(n for n in graph.node if repeated.output[0] in n.input)
        inserted(graph, repeated.output[0], "Gather", np.array([0, 2, 1, 3]), axis=1)


def no_causal_mask(graph: onnx.GraphProto) -> None:
    found = next(n for n in graph.node if n.op_type == "LessOrEqual")
    name = found.output[0]
    reader = next(n for n in graph.node if name in n.input)
    reader.input[list(reader.input).index(name)] = "always"
    at = list(graph.node).index(reader)
    graph.node.insert(at, helper.make_node("Or", [name, "never"], ["always"]))
    graph.node.insert(at, helper.make_node("Not", [name], ["never"]))


def integers_by_swapped_nibbles(module: str) -> Edit:
    def edit(graph: onnx.GraphProto) -> None:
        found = tensor(graph, f"{module}.weight_codes")
        packed = np.frombuffer(found.raw_data, np.uint8)
        found.raw_data = ((packed << 4) | (packed >> 4)).astype(np.uint8).tobytes()

    return edit_onnx("model", edit)


def rope_base(folder: str) -> Edit:
    """Use base 5,000 in place of 10,000."""
    power = math.log(5_000) / math.log(10_000)
    return values(folder, "model.rotary_emb.inv_freq", lambda f: f**power)


def swapped_tensors(a: str, b: str) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        x, y = tensor(graph, a), tensor(graph, b)
        x.name, y.name = b, a

    return change


def looked_up_in_float(run: Run) -> None:
    """Read rows from the float table again; no file records that."""
    path = run.folder("model") / "model.onnx"
    model, source = onnx.load(path), onnx.load(run.folder("graph") / "model.onnx")
    table = tensor(source.graph, f"{TABLE}.weight")
    model.graph.initializer.append(table)
    codes = next(n for n in model.graph.node if f"{TABLE}.weight_codes" in n.input)
    last = max(
        (n for n in model.graph.node if n.name.startswith(f"{TABLE}/")), key=_position(model)
    )
    last.CopyFrom(
        helper.make_node("Gather", [table.name, codes.input[1]], last.output, name=last.name)
    )
    entry = last.metadata_props.add()
    entry.key, entry.value = "module", TABLE
    onnx.save(model, path)


def _position(model: onnx.ModelProto) -> Callable[[onnx.NodeProto], int]:
    names = [n.name for n in model.graph.node]
    return lambda node: names.index(node.name)


TABLE_FAULTS: dict[str, Edit] = {
    "scales of other groups": values("model", f"{TABLE}.weight_scale", lambda s: np.roll(s, 1, 1)),
    "a transposed scale": values("model", f"{TABLE}.weight_scale", lambda s: s.T),
    "scales of other rows": values("model", f"{TABLE}.weight_scale", lambda s: np.roll(s, 1, 0)),
    "integers of other groups": values(
        "model", f"{TABLE}.weight_codes", lambda c: np.roll(c, 1, 1)
    ),
    "a float table": looked_up_in_float,
}

GRAPH_FAULTS: dict[str, Change] = {
    "a stale cache": stale,
    "a layer that reads another's past": past_of_another_layer,
    "a layer that returns another's present": present_of_another_layer,
    "past keys and values exchanged": past_keys_as_values,
    "positions off by one": position_off_by_one,
    "query heads that read the wrong keys and values": other_heads,
    "no causal mask": no_causal_mask,
}

FUSED_FAULTS: dict[str, Change] = {
    "a stale cache": stale,
    "a layer that reads another's past": past_of_another_layer,
    "a layer that returns another's present": present_of_another_layer,
    "past keys and values exchanged": past_keys_as_values,
    "another scale of the scores": other_scale,
    "angles off by one position": other_angles,
    "the left padding seen": padding_seen,
}
