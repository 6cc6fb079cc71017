"""Plant faults too small for the outputs to show: one channel, one constant, one operand of a
graph. The dialects name nodes and initializers alike, except those that only one has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from optimizer.lower.ort.product import BIAS, OPERATOR
from tests.validate.ledger.faults.decoder_mutations import Change, inserted, made_by
from tests.validate.ledger.faults.mutations import product, tensor

Array = np.ndarray[Any, Any]

BLOCK = "encoder.layer.1"
DENSE = f"{BLOCK}.output.dense"
QUERY = f"{BLOCK}.attention.self.query"
CONTEXT = f"{BLOCK}.attention.output.dense"
UP = f"{BLOCK}.intermediate.dense"
NORM = f"{BLOCK}.attention.output.LayerNorm"

LLAMA = "model.layers.1"
LLAMA_QUERY, LLAMA_CONTEXT = f"{LLAMA}.self_attn.q_proj", f"{LLAMA}.self_attn.o_proj"
LLAMA_UP, LLAMA_DOWN = f"{LLAMA}.mlp.up_proj", f"{LLAMA}.mlp.down_proj"
LLAMA_NORM = f"{LLAMA}.post_attention_layernorm"


def changed(graph: onnx.GraphProto, name: str, change: Callable[[Array], Array]) -> None:
    """Change values of one initializer, keeping its type."""
    found = tensor(graph, name)
    old = numpy_helper.to_array(found)
    new = np.asarray(change(old.copy())).astype(old.dtype)
    assert not np.array_equal(old, new), "the fault changes nothing"
    found.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(new).reshape(old.shape), name))


def own(
    graph: onnx.GraphProto, node: onnx.NodeProto, place: int, change: Callable[[Array], Array]
) -> None:
    """Change values for this node alone; others read the right ones."""
    old = numpy_helper.to_array(tensor(graph, node.input[place]))
    name = f"{node.name}/fault_{place}"
    new = np.asarray(change(old.copy())).astype(old.dtype)
    assert not np.array_equal(old, new), "the fault changes nothing"
    graph.initializer.append(numpy_helper.from_array(new, name))
    node.input[place] = name


def one_element(index: Any, change: Callable[[Any], Any]) -> Callable[[Array], Array]:
    def edit(values: Array) -> Array:
        values[index] = change(values[index])
        return values

    return edit


def named(graph: onnx.GraphProto, op: str, part: str) -> onnx.NodeProto:
    """The first node of this operator with this prefix."""
    return next(n for n in graph.node if n.op_type == op and n.name.startswith(part))


def quantizer_of(graph: onnx.GraphProto, module: str) -> onnx.NodeProto:
    """The QuantizeLinear that the module's product reads."""
    node = product(graph, module)
    while node.op_type != "QuantizeLinear":
        node = made_by(graph, node.input[0])
    return node


def read_back(graph: onnx.GraphProto, module: str) -> tuple[onnx.NodeProto, int, int]:
    """The node that dequantizes the module's input, and the indices of its scale and zero point."""
    integers = quantizer_of(graph, module).output[0]
    node = next(n for n in graph.node if integers in n.input)
    return (node, 2, 4) if node.op_type == OPERATOR else (node, 1, 2)


def reader(graph: onnx.GraphProto, value: str, op: str) -> onnx.NodeProto:
    return next(n for n in graph.node if n.op_type == op and value in n.input)


def bias_of(graph: onnx.GraphProto, module: str) -> str:
    """The bias of the module's product; its name differs with the dialect."""
    node = product(graph, module)
    if node.op_type == OPERATOR:
        return str(node.input[BIAS])
    added = reader(graph, node.output[0], "Add")
    held = {i.name for i in graph.initializer}
    return next(name for name in added.input if name in held)


def of_module(node: onnx.NodeProto, module: str) -> onnx.NodeProto:
    entry = node.metadata_props.add()
    entry.key, entry.value = "module", module
    return node


# One linear module ------------------------------------------------------------------------------


def weight_scale_of_one_channel(module: str) -> Change:
    return lambda g: changed(g, f"{module}.weight_scale", one_element(5, lambda s: s * 1.01))


def scale_of_one_group(module: str) -> Change:
    return lambda g: changed(g, f"{module}.weight_scale", one_element((1, 5), lambda s: s * 1.01))


def channels_swapped(module: str) -> Change:
    """Exchange integers, scales and bias of two channels: each is right, in the wrong place."""

    def swap(values: Array) -> Array:
        values[..., [3, 4]] = values[..., [4, 3]]
        return values

    def change(graph: onnx.GraphProto) -> None:
        parts = [f"{module}.weight_codes", f"{module}.weight_scale", bias_of(graph, module)]
        for name in parts:
            changed(graph, name, swap)

    return change


def activation_scale(module: str) -> Change:
    """Change the scale on both sides, as one constant."""

    def change(graph: onnx.GraphProto) -> None:
        node = quantizer_of(graph, module)
        back, scale, _ = read_back(graph, module)
        names = {node.input[1], back.input[scale]}
        for name in names:
            changed(graph, name, lambda s: s * 1.005)

    return change


def scale_of_the_integers_read_back(module: str) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        node, scale, _ = read_back(graph, module)
        own(graph, node, scale, lambda s: s * 1.005)

    return change


def zero_point_of_the_integers_read_back(module: str) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        node, _, zero = read_back(graph, module)
        own(graph, node, zero, lambda z: z + 1)

    return change


def zero_point(module: str) -> Change:
    return lambda g: own(g, quantizer_of(g, module), 2, lambda z: z + 1)


def offset_by_half_a_step(module: str) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        step = numpy_helper.to_array(tensor(graph, quantizer_of(graph, module).input[1]))
        changed(graph, f"{module}/input_offset", lambda x: x + step.astype(x.dtype) / 2)

    return change


def bias_in_float16(module: str) -> Change:
    return lambda g: changed(
        g, bias_of(g, module), lambda b: b.astype(np.float16).astype(np.float32)
    )


def bias_of_one_channel_by_a_step(module: str) -> Change:
    def step(value: Any) -> Any:
        return np.nextafter(value, np.asarray(np.inf, value.dtype))

    return lambda g: changed(g, bias_of(g, module), one_element(7, step))


def ties_away_from_zero(module: str) -> Change:
    """Push the float in front outwards by a few roundoffs: only ties move."""

    def change(graph: onnx.GraphProto) -> None:
        node = quantizer_of(graph, module)
        kind = numpy_helper.to_array(tensor(graph, node.input[1])).dtype
        push = np.asarray(1 + 4 * np.finfo(kind).eps, kind)
        name = f"{module}/outwards"
        graph.initializer.append(numpy_helper.from_array(push, f"{name}_by"))
        made = of_module(
            helper.make_node("Mul", [node.input[0], f"{name}_by"], [name], name), module
        )
        graph.node.insert(list(graph.node).index(node), made)
        node.input[0] = name

    return change


def saturation_one_early(module: str) -> Change:
    """Replace the lowest integer: -127 for -128, 1 for 0."""

    def change(graph: onnx.GraphProto) -> None:
        node = quantizer_of(graph, module)
        signed = not (len(node.input) > 2 and node.input[2])
        low, kind = (-127, np.int8) if signed else (1, np.uint8)
        graph.initializer.append(numpy_helper.from_array(np.array(low, kind), f"{module}/lowest"))
        name = f"{module}/clipped"
        for user in [n for n in graph.node if node.output[0] in n.input]:
            user.input[list(user.input).index(node.output[0])] = name
        made = of_module(
            helper.make_node("Clip", [node.output[0], f"{module}/lowest"], [name], name), module
        )
        graph.node.insert(list(graph.node).index(node) + 1, made)

    return change


def largest_for_largest_magnitude(module: str) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        node = next(n for n in graph.node if n.op_type == "Abs" and n.name.startswith(f"{module}/"))
        node.op_type = "Identity"

    return change


def steps_of_128(module: str) -> Change:
    return lambda g: own(g, named(g, "Div", f"{module}/"), 1, lambda v: v + 1)


def rows_scaled_back_by_more(module: str) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        float_product = reader(graph, product(graph, module).output[0], "Cast").output[0]
        node = reader(graph, float_product, "Mul")
        by = f"{module}/more"
        graph.initializer.append(numpy_helper.from_array(np.array(1.005, np.float32), f"{by}_by"))
        made = of_module(helper.make_node("Mul", [node.input[1], f"{by}_by"], [by], by), module)
        graph.node.insert(list(graph.node).index(node), made)
        node.input[1] = by

    return change


# Between two linear modules ---------------------------------------------------------------------


def gelu_by_tanh(graph: onnx.GraphProto) -> None:
    gelu = [n for n in graph.node if n.op_type == "Gelu"][-1]
    del gelu.attribute[:]
    gelu.attribute.append(helper.make_attribute("approximate", "tanh"))


def epsilon_of_one_norm(graph: onnx.GraphProto) -> None:
    found = named(graph, "LayerNormalization", NORM)
    next(a for a in found.attribute if a.name == "epsilon").f *= 10


def rms_epsilon(graph: onnx.GraphProto) -> None:
    """Change the epsilon of one norm, in every form of the graph."""
    for node in graph.node:
        if node.name.startswith(f"{LLAMA_NORM}/"):
            for attribute in (a for a in node.attribute if a.name == "epsilon"):
                attribute.f *= 10
                return
    own(graph, named(graph, "Add", f"{LLAMA_NORM}/"), 1, lambda e: e * 10)


def scores_scaled_for_one_more(block: str) -> Change:
    """Scale by 1 / sqrt(d + 1): the one multiplication of the scores by a constant."""

    def change(graph: onnx.GraphProto) -> None:
        held = {i.name for i in graph.initializer if not i.dims}
        for node in graph.node:
            if node.op_type == "GroupQueryAttention" and node.name.startswith(block):
                scale = next(a for a in node.attribute if a.name == "scale")
                scale.f = 1 / math.sqrt(1 / scale.f**2 + 1)
                return
        node = next(
            n
            for n in graph.node
            if n.op_type == "Mul" and n.name.startswith(block) and n.input[1] in held
        )
        own(graph, node, 1, lambda s: 1 / np.sqrt(1 / s.astype(np.float64) ** 2 + 1))

    return change


def two_heads_swapped(value: str) -> Change:
    """Exchange two heads of value (batch, heads, tokens, size)."""
    return lambda g: inserted(g, value, "Gather", np.array([1, 0, 2, 3]), axis=1)


def residual_of_the_quantized(graph: onnx.GraphProto) -> None:
    """Add the dequantized input of the query after the attention."""
    made = quantizer_of(graph, QUERY)
    found, name = named(graph, "Add", f"{BLOCK}.attention.output/"), f"{BLOCK}/read_back"
    back = helper.make_node("DequantizeLinear", [made.output[0], *made.input[1:]], [name], name)
    graph.node.insert(list(graph.node).index(made) + 1, back)
    found.input[1] = name


def one_padded_column_seen(left: bool) -> Change:
    """Let the padded column beside the text through the mask."""

    def change(graph: onnx.GraphProto) -> None:
        mask, near = "attention_mask", "attention_mask/moved"
        users = [n for n in graph.node if mask in n.input and n.op_type != "Shape"]
        numbers = {"0": 0, "1": 1, "-1": -1, "end": 1 << 30}
        for name, value in numbers.items():
            array = np.array([value], np.int64)
            graph.initializer.append(numpy_helper.from_array(array, f"{near}/{name}"))
        # Every column beside its neighbour on the text's side; the outermost beside itself.
        ends = {"moved": ("1", "end"), "edge": ("-1", "end")}
        ends = ends if left else {"edge": ("0", "1"), "moved": ("0", "-1")}
        made = [
            helper.make_node(
                "Slice", [mask, *(f"{near}/{e}" for e in (*pair, "1"))], [f"{near}/{n}"]
            )
            for n, pair in ends.items()
        ]
        made.append(helper.make_node("Concat", [f"{near}/{n}" for n in ends], [near], axis=1))
        made.append(helper.make_node("Max", [mask, near], [f"{near}/both"]))
        at = list(graph.node).index(users[0])
        for user in users:
            user.input[list(user.input).index(mask)] = f"{near}/both"
        for i, node in enumerate(made):
            graph.node.insert(at + i, node)

    return change


def positions_off_by_one(graph: onnx.GraphProto) -> None:
    found = named(graph, "Gather", "embeddings.position_embeddings")
    inserted(graph, found.input[1], "Add", np.array(1, np.int64))


def one_frequency(index: int) -> Change:
    return lambda g: changed(
        g, "model.rotary_emb.inv_freq", one_element(index, lambda f: f * 1.001)
    )


def one_angle(graph: onnx.GraphProto) -> None:
    """Change the slowest frequency, where the graph has tables."""
    slowest = 10_000 ** (-7 / 8) * 1.001
    for name, function in (("rotary_cos", np.cos), ("rotary_sin", np.sin)):

        def turned(column: Array, f: Any = function) -> Array:
            return np.asarray(f(np.arange(len(column)) * slowest))

        changed(graph, name, one_element((slice(None), 7), turned))


def frequencies_of_one_head(graph: onnx.GraphProto) -> None:
    """Turn query head 2 of block 1 faster; the keys do not turn faster."""
    angle, attention = "model.rotary_emb/Concat:0", f"{LLAMA}.self_attn"
    by = np.array([1, 1, 1.001, 1], np.float32).reshape(1, 4, 1, 1)
    for name, array in (("fault/by", by), ("fault/axis", np.array([1], np.int64))):
        graph.initializer.append(numpy_helper.from_array(array, name))
    made = [
        helper.make_node("Unsqueeze", [angle, "fault/axis"], ["fault/angle"]),
        helper.make_node("Mul", ["fault/angle", "fault/by"], ["fault/heads"]),
        helper.make_node("Cos", ["fault/heads"], ["fault/cos"]),
        helper.make_node("Sin", ["fault/heads"], ["fault/sin"]),
    ]
    both = [n for n in graph.node if n.op_type == "Mul" and n.name.startswith(f"{attention}/")][:2]
    at = list(graph.node).index(both[0])
    for node, turn in zip(both, ("fault/cos", "fault/sin"), strict=True):
        assert made_by(graph, node.input[1]).op_type == "Unsqueeze"
        node.input[1] = turn
    for i, node in enumerate(made):
        graph.node.insert(at + i, node)


def gate_and_up_swapped(graph: onnx.GraphProto) -> None:
    """Apply the activation function to the other projection."""
    parts = f"{LLAMA}.mlp"
    gate = named(graph, "Sigmoid", f"{parts}.act_fn").input[0]
    merged = next(n for n in graph.node if n.op_type == "Mul" and n.name.startswith(f"{parts}/"))
    up = next(name for name in merged.input if "act_fn" not in name)
    for node in graph.node:
        if node.name.startswith(f"{parts}.act_fn"):
            for i, name in enumerate(node.input):
                node.input[i] = up if name == gate else name
    merged.input[list(merged.input).index(up)] = gate
    _ordered(graph)


def _ordered(graph: onnx.GraphProto) -> None:
    """Sort nodes after those that they read."""
    nodes, known = list(graph.node), {v.name for v in [*graph.initializer, *graph.input]} | {""}
    del graph.node[:]
    while nodes:
        ready = next(n for n in nodes if known.issuperset(n.input))
        nodes.remove(ready)
        known.update(ready.output)
        graph.node.append(ready)
