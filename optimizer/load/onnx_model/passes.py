"""Steps that bring a graph into the form of model/graph/record.py, in the order of this file, each
on a Draft in place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import torch

from optimizer.load.onnx_model.draft import Array, Draft, Operator
from optimizer.model.checkpoint.batch_norms import fold
from optimizer.model.graph.module import FAILURES
from optimizer.model.graph.operators import OPERATORS
from optimizer.model.graph.record import BODY, CONV, LINEAR, resolve

PARAMETERS = f"{BODY}."
"""Beginning of the names of parameters, and of tensors that a lowering adds."""
FOLDED = 1 << 26  # maximum values of a folded result


def fold_constants(draft: Draft) -> None:
    """Replace a node whose inputs are all constants by its results."""
    kept = []
    for node in draft.nodes:
        values = draft.constant_inputs(node)
        results = None if values is None or node.domain else _compute(node, values, draft)
        if results is None:
            kept.append(node)
            continue
        draft.constants.update(zip(node.outputs, results, strict=False))
    draft.nodes = kept


def _compute(node: Operator, values: list[Array | None], draft: Draft) -> list[Array] | None:
    if node.op not in OPERATORS:
        return None
    attributes = {
        k: torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v
        for k, v in resolve(node.attributes, draft.constants).items()
    }
    inputs = [None if v is None else torch.from_numpy(np.array(v)) for v in values]
    try:
        result = OPERATORS[node.op](inputs, attributes)
    except FAILURES:
        return None
    results = result if isinstance(result, tuple) else (result,)
    if any(node.outputs[len(results) :]) or sum(r.numel() for r in results) > FOLDED:
        return None
    return [r.contiguous().numpy() for r in results]


def drop_unread_outputs(draft: Draft) -> None:
    """Remove outputs of operators that may be left out and that nothing reads, such as the mask of
    a Dropout."""
    read = {*draft.outputs, *(name for node in draft.nodes for name in node.inputs)}
    for node in draft.nodes:
        if len(node.outputs) < 2 or node.domain or not onnx.defs.has(node.op):
            continue
        known = onnx.defs.get_schema(node.op, draft.opset).outputs
        for i, (name, output) in enumerate(zip(node.outputs, known, strict=False)):
            if (
                name not in read
                and output.option == onnx.defs.OpSchema.FormalParameterOption.Optional
            ):
                node.outputs[i] = ""


def drop_identities(draft: Draft) -> None:
    """Remove Identity and Dropout, except one that makes an output of the graph."""
    kept = []
    for node in draft.nodes:
        plain = node.op in ("Identity", "Dropout") and not node.domain
        if plain and node.outputs[0] not in draft.outputs and not any(node.outputs[1:]):
            draft.rename(node.outputs[0], node.inputs[0])
        else:
            kept.append(node)
    draft.nodes = kept


def explicit_padding(draft: Draft) -> None:
    """Write auto_pad as numbers, where the size of the image is known."""
    for node in draft.nodes:
        word = node.attributes.get("auto_pad", "NOTSET")
        image = draft.shapes.get(node.inputs[0]) if node.inputs else None
        if word not in ("SAME_UPPER", "SAME_LOWER") or node.op == "ConvTranspose" or not image:
            continue
        kernel = _kernel(node, draft)
        sizes = image[2:]
        if kernel is None or any(not n for n in sizes):
            continue
        steps = node.attributes.get("strides") or [1] * len(kernel)
        dilations = node.attributes.get("dilations") or [1] * len(kernel)
        before, after = [], []
        for size, k, s, d in zip(sizes, kernel, steps, dilations, strict=True):
            total = max(
                (math.ceil(int(size or 0) / s) - 1) * s + d * (k - 1) + 1 - int(size or 0), 0
            )
            small, large = total // 2, total - total // 2
            before.append(small if word == "SAME_UPPER" else large)
            after.append(large if word == "SAME_UPPER" else small)
        node.attributes |= {"auto_pad": "NOTSET", "pads": [*before, *after]}


def _kernel(node: Operator, draft: Draft) -> list[int] | None:
    if "kernel_shape" in node.attributes:
        return list(node.attributes["kernel_shape"])
    weight = draft.constants.get(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if weight is None else list(weight.shape[2:])


def fold_batch_norms(draft: Draft) -> None:
    """Fold a BatchNormalization behind a Conv into its weight and bias, in float64."""
    readers = draft.readers()
    for norm in [n for n in draft.nodes if n.op == "BatchNormalization" and not n.domain]:
        before = next((n for n in draft.nodes if norm.inputs[0] in n.outputs), None)
        values = [draft.constants.get(name) for name in norm.inputs[1:5]]
        if (
            before is None
            or before.op != "Conv"
            or draft.alone(norm.inputs[0], readers) is not norm
        ):
            continue
        weight = draft.constants.get(before.inputs[1])
        bias = draft.constants.get(before.inputs[2]) if len(before.inputs) > 2 else None
        constant = weight is not None and (bias is not None or len(before.inputs) < 3)
        if not constant or any(v is None for v in values) or len(readers[before.inputs[1]]) > 1:
            continue
        if norm.attributes.get("training_mode") or any(norm.outputs[1:]):
            continue
        parts = dict(
            zip(
                ("weight", "bias", "running_mean", "running_var"), map(_tensor, values), strict=True
            )
        )
        new_weight, new_bias = fold(
            _tensor(weight),
            None if bias is None else _tensor(bias),
            parts,
            norm.attributes.get("epsilon", 1e-5),
        )
        name = draft.fresh(f"{before.inputs[1]}/bias")
        draft.constants[before.inputs[1]] = new_weight.numpy()
        draft.constants[name] = new_bias.numpy()
        before.inputs = [*before.inputs[:2], name]
        before.outputs = list(norm.outputs)
        draft.nodes.remove(norm)


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array, np.float32))


def find_products(draft: Draft) -> None:
    """Turn a MatMul or Gemm by a constant matrix, with a constant that is added behind it, into a
    Linear, and a Conv of images by constant filters into a Conv2d."""
    readers = draft.readers()
    for node in list(draft.nodes):
        if node.domain or node not in draft.nodes:
            continue
        if node.op == "Conv":
            _convolution(node, draft, readers)
        elif node.op == "Gemm":
            _gemm(node, draft, readers)
        elif node.op == "MatMul":
            _product(node, draft, readers)


def _convolution(node: Operator, draft: Draft, readers: dict[str, list[Operator]]) -> None:
    weight = draft.constants.get(node.inputs[1])
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    a = node.attributes
    if weight is None or weight.ndim != 4 or len(readers[node.inputs[1]]) > 1:
        return
    if (bias and bias not in draft.constants) or a.get("auto_pad", "NOTSET") not in (
        "NOTSET",
        "VALID",
    ):
        return
    node.op, node.module, node.bias = CONV, node.inputs[1], bias
    node.attributes = {
        "strides": a.get("strides") or [1, 1],
        "pads": a.get("pads") or [0] * 4,
        "dilations": a.get("dilations") or [1, 1],
        "group": a.get("group", 1),
    }
    node.inputs = node.inputs[:1]


def _gemm(node: Operator, draft: Draft, readers: dict[str, list[Operator]]) -> None:
    a, matrix = node.attributes, draft.constants.get(node.inputs[1])
    if matrix is None or matrix.dtype != np.float32 or a.get("transA"):
        return
    outputs = matrix.shape[0] if a.get("transB") else matrix.shape[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    if bias and len(readers[node.inputs[1]]) > 1:  # a module has one bias
        return
    added = draft.constants.get(bias)
    if bias and (
        added is None
        or not np.isfinite(added).all()
        or added.size not in (1, outputs)
        or added.shape[:-1] not in ((), (1,))
    ):
        return
    weight = _times(node.inputs[1], a.get("alpha", 1.0), draft)
    if not a.get("transB"):  # a Linear's weight is (out, in)
        weight = _transposed(weight, draft)
    if added is not None:
        bias = _times(_flat(bias, outputs, draft), a.get("beta", 1.0), draft)
    _linear(node, weight, bias)


def _product(node: Operator, draft: Draft, readers: dict[str, list[Operator]]) -> None:
    matrix = draft.constants.get(node.inputs[1])
    if matrix is None or matrix.ndim != 2 or matrix.dtype != np.float32:
        return
    if node.inputs[0] in draft.constants:
        return
    bias, alone = "", len(readers[node.inputs[1]]) == 1
    behind = draft.alone(node.outputs[0], readers) if alone else None
    if behind is not None and behind.op == "Add" and not behind.domain:
        other = next((n for n in behind.inputs if n != node.outputs[0]), "")
        added = draft.constants.get(other)
        fits = added is not None and added.shape == (matrix.shape[1],)
        if added is not None and fits and np.isfinite(added).all():  # infinity is a mask
            bias, node.outputs = other, list(behind.outputs)
            draft.nodes.remove(behind)
    _linear(node, _transposed(node.inputs[1], draft), bias)


def is_parameter(array: Array) -> bool:
    """True for an initializer that is a parameter of the model: floats, more than one."""
    return array.dtype == np.float32 and array.ndim > 0 and array.size > 1


def _linear(node: Operator, weight: str, bias: str) -> None:
    node.op, node.module, node.bias = LINEAR, weight, bias
    node.inputs, node.attributes = node.inputs[:1], {}


def free_names(draft: Draft) -> None:
    """Rename operators, and tensors between them, whose names begin as those of parameters do."""
    between = [n for node in draft.nodes for n in node.outputs if n not in draft.outputs]
    small = [n for n, a in draft.constants.items() if not is_parameter(a)]
    for old in [n for n in (*between, *small) if n.startswith(PARAMETERS)]:
        new = draft.fresh(f"_{old}")
        draft.rename(old, new)
        if old in draft.constants:
            draft.constants[new] = draft.constants[old]
        for node in draft.nodes:
            node.outputs = [new if n == old else n for n in node.outputs]
    names = {node.name for node in draft.nodes}
    for node in [n for n in draft.nodes if n.name.startswith(PARAMETERS)]:
        name = f"_{node.name}"
        while name in names:
            name = f"_{name}"
        names.add(name)
        node.name = name


TURNED = ":t"
"""Ending of the name of a transposed matrix."""
TIMES = ":times "
"""In the name of a constant that was multiplied, before the factor."""


def _transposed(name: str, draft: Draft) -> str:
    turned, matrix = name + TURNED, np.ascontiguousarray(draft.constants[name].T)
    while turned in draft.constants and not np.array_equal(
        draft.constants[turned], matrix, equal_nan=True
    ):
        turned += TURNED
    draft.constants[turned] = matrix
    return turned


def _times(name: str, factor: float, draft: Draft) -> str:
    """The constant `name` times a factor, rounded once."""
    if factor == 1:
        return name
    scaled = draft.fresh(f"{name}{TIMES}{factor:.9g}")
    draft.constants[scaled] = (draft.constants[name] * np.float64(factor)).astype(np.float32)
    return scaled


def _flat(name: str, count: int, draft: Draft) -> str:
    array = draft.constants[name]
    if array.shape == (count,):
        return name
    flat = draft.fresh(f"{name}:flat")
    draft.constants[flat] = np.broadcast_to(array.reshape(-1), (count,)).copy()
    return flat
