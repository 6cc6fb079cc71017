"""Compute channels first what a file computes channels last behind a convolution.

TensorFlow exporters transpose the output of a Conv to channels last, and the next input back.
Nothing between the two folds into a Conv, and no integers go from one to the next.

    Conv -> Transpose(0 2 3 1) -> Add, Relu, ... -> Transpose(0 3 1 2) -> Conv
    Conv -> Add, Relu, ... -> Conv

An operator that treats all elements alike, or that names its axes, runs on the tensor before the
Transpose. A Transpose behind it makes the file's own tensor, if anything reads it. Attention, which
transposes in the same way, has no operator of images before it and stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from optimizer.load.onnx_model.draft import Array, Draft, Operator

LAST, FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
"""Axes of a Transpose from channels first to channels last, and back."""
OF_IMAGES = ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "BatchNormalization", "Resize")
"""Operators whose results have channels first in ONNX."""
BY_ELEMENT = (
    *("Add", "Sub", "Mul", "Div", "Min", "Max", "Neg", "Abs", "Exp", "Sqrt", "Erf", "Tanh"),
    *("Relu", "Clip", "LeakyRelu", "PRelu", "Elu", "Sigmoid", "HardSigmoid", "HardSwish"),
)
REDUCTIONS = ("ReduceMean", "ReduceMax", "ReduceSum")


def keep_channels_first(draft: Draft) -> None:
    """Remove the Transposes around operators of a loaded ONNX file that can run channels first, in
    place; leave a graph that would not have fewer of them."""
    tried = replace(draft, nodes=[], constants=dict(draft.constants))
    first: dict[str, str] = {}  # {tensor with channels last: the same with channels first}
    same: dict[str, str] = {}  # {tensor of a Transpose that is gone: the tensor before both}
    images: set[str] = set()
    for old in draft.nodes:
        node = replace(old, inputs=[same.get(n, n) for n in old.inputs])
        source, output = (*node.inputs, "")[0], node.outputs[0]
        if _axes(node) == FIRST and source in first and output not in draft.outputs:
            same[output] = first[source]
            continue
        if _axes(node) == LAST and source in images:
            first[output] = source
        if node.op in OF_IMAGES and not node.domain:
            images.add(output)
        moved = _moved(node, first, draft, tried.constants)
        tried.nodes.append(moved or node)
        if moved and moved.outputs[0] != output:
            first[output] = moved.outputs[0]
            back = Operator("Transpose", f"{node.name}:last", moved.outputs, [output])
            tried.nodes.append(replace(back, attributes={"perm": LAST}))
    of_file = {name for node in draft.nodes for name in node.outputs}
    ours = {n: name for name, n in same.items() if n not in of_file}
    for node in tried.nodes:
        node.inputs = [ours.get(n, n) for n in node.inputs]
        node.outputs = [ours.get(n, n) for n in node.outputs]
    tried.remove_unread()
    if _transposes(tried) < _transposes(draft):
        draft.nodes, draft.constants = tried.nodes, tried.constants


def _transposes(draft: Draft) -> int:
    return sum(node.op == "Transpose" for node in draft.nodes)


def _axes(node: Operator) -> list[int] | None:
    """Axes of a Transpose in a loaded ONNX file; None of another operator."""
    return node.attributes.get("perm") if node.op == "Transpose" and not node.domain else None


def _moved(
    node: Operator, first: Mapping[str, str], draft: Draft, constants: dict[str, Array]
) -> Operator | None:
    """Return `node` of a loaded ONNX file on tensors with channels first; None where it stays as it
    is.

    constants: receives those of the new operator
    """
    if node.domain or not any(name in first for name in node.inputs):
        return None
    attributes, outputs = dict(node.attributes), [draft.fresh(f"{node.outputs[0]}:first")]
    inputs: list[str | None] = [first.get(name) for name in node.inputs]
    if node.op in BY_ELEMENT:
        inputs = [first.get(name) or _turned(name, draft, constants) for name in node.inputs]
    elif node.op == "Concat":
        attributes["axis"] = LAST[attributes["axis"] % len(LAST)]
    elif node.op in ("Pad", *REDUCTIONS) and len(node.inputs) > 1:
        name, values = node.inputs[1], draft.constants.get(node.inputs[1])
        if values is None:
            return None
        if node.op == "Pad":
            if len(node.inputs) > 3 or values.size != 2 * len(LAST):
                return None  # its sides are of the axes that it lists
            values = values.reshape(2, -1)[:, FIRST].reshape(-1)
        else:
            values = np.array([LAST[axis % len(LAST)] for axis in values.tolist()])
            if not attributes.get("keepdims", 1):  # channels remain, as the last axis
                outputs = list(node.outputs) if sorted(values) == [2, 3] else []
        inputs[1:] = [f"{name}:first", *node.inputs[2:]]
        constants[f"{name}:first"] = values
    else:
        return None
    if not outputs or None in inputs:
        return None
    known = [name for name in inputs if name is not None]
    return replace(node, inputs=known, outputs=outputs, attributes=attributes)


def _turned(name: str, draft: Draft, constants: dict[str, Array]) -> str | None:
    """Return the name of a constant operand in a loaded ONNX file with channels first, or "" of an
    input that is left out; None of a tensor that is not constant."""
    array = draft.constants.get(name)
    if not name:
        return name
    if array is None or array.ndim > len(LAST):
        return None
    if array.size == 1:
        return name
    whole = array.reshape(*[1] * (len(LAST) - array.ndim), *array.shape)
    constants[f"{name}:first"] = np.ascontiguousarray(whole.transpose(FIRST))
    return f"{name}:first"
