"""Steps that bring a graph into the form of model/graph/record.py, in the order of this file, each
on a Draft in place."""

from __future__ import annotations

import math

import numpy as np
import onnx
import torch

from optimizer.load.onnx_model.draft import Array, Draft, Operator
from optimizer.model.graph.module import FAILURES
from optimizer.model.graph.operators import OPERATORS
from optimizer.model.graph.record import BODY, CONV, LINEAR, resolve

PARAMETERS = f"{BODY}."
"""Beginning of the names of parameters, and of tensors that a lowering adds."""
UNPADDED = ("NOTSET", "VALID")
"""Values of auto_pad that add nothing to the attribute pads."""
FOLDED = 1 << 26  # maximum values of a folded result


def fold_constants(draft: Draft) -> None:
    """Replace a node of a loaded ONNX file whose inputs are all constants by its results."""
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
    """Compute the results of a loaded ONNX file's node in torch; None where it is not folded (by
    operator, error or size)."""
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
    """Remove outputs of a loaded ONNX file's operators that may be left out and that nothing reads,
    such as the mask of a Dropout."""
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
    """Remove Identity and Dropout from a loaded ONNX file, except one that makes an output of the
    graph."""
    kept = []
    for node in draft.nodes:
        plain = node.op in ("Identity", "Dropout") and not node.domain
        if plain and node.outputs[0] not in draft.outputs and not any(node.outputs[1:]):
            draft.rename(node.outputs[0], node.inputs[0])
        else:
            kept.append(node)
    draft.nodes = kept


def explicit_padding(draft: Draft) -> None:
    """Write auto_pad in a loaded ONNX file as numbers, where the size of the image is known or does
    not matter."""
    for node in draft.nodes:
        word = node.attributes.get("auto_pad", "NOTSET")
        image = draft.shapes.get(node.inputs[0]) if node.inputs else None
        kernel = _kernel(node, draft)
        if word not in ("SAME_UPPER", "SAME_LOWER") or node.op == "ConvTranspose" or not kernel:
            continue
        steps = node.attributes.get("strides") or [1] * len(kernel)
        sizes = image[2:] if image else [None] * len(kernel)
        if any(not n and s > 1 for n, s in zip(sizes, steps, strict=True)):
            continue
        dilations = node.attributes.get("dilations") or [1] * len(kernel)
        before, after = [], []
        for n, k, s, d in zip(sizes, kernel, steps, dilations, strict=True):
            size = int(n or 0)
            total = max((math.ceil(size / s) - 1) * s + d * (k - 1) + 1 - size, 0)
            small, large = total // 2, total - total // 2
            before.append(small if word == "SAME_UPPER" else large)
            after.append(large if word == "SAME_UPPER" else small)
        node.attributes |= {"auto_pad": "NOTSET", "pads": [*before, *after]}


def _kernel(node: Operator, draft: Draft) -> list[int] | None:
    if "kernel_shape" in node.attributes:
        return list(node.attributes["kernel_shape"])
    weight = draft.constants.get(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if weight is None else list(weight.shape[2:])


def fold_padding(draft: Draft) -> None:
    """Let a Conv of a loaded ONNX file pad its image itself, where a Pad adds zeros to it."""
    makers = {name: node for node in draft.nodes for name in node.outputs}
    for node in draft.nodes:
        pad = makers.get(node.inputs[0]) if _is(node, "Conv") else None
        weight = draft.constants.get(node.inputs[1]) if pad is not None else None
        if pad is None or not _is(pad, "Pad") or weight is None:
            continue
        added = _zeros_added(pad, weight.ndim, draft)
        word = node.attributes.get("auto_pad", "NOTSET")
        if added is None or word not in UNPADDED:
            continue
        own = (word == "NOTSET" and node.attributes.get("pads")) or [0] * len(added)
        sides = [a + b for a, b in zip(own, added, strict=True)]
        node.attributes |= {"auto_pad": "NOTSET", "pads": sides}
        node.inputs[0] = pad.inputs[0]


def _is(node: Operator, op: str) -> bool:
    return node.op == op and not node.domain


def _zeros_added(pad: Operator, rank: int, draft: Draft) -> list[int] | None:
    """Read the zeros that a Pad of a loaded ONNX file adds before and after each axis of an image;
    None where it does else."""
    sizes, fill, axes = (draft.constants.get(n) for n in (*pad.inputs, "", "")[1:4])
    unread = any(n and n not in draft.constants for n in pad.inputs[1:])
    unread = unread or pad.attributes.get("mode", "constant") != "constant"
    if unread or (fill is not None and fill.any()) or sizes is None or (sizes < 0).any():
        return None
    sides = np.zeros((2, rank), np.int64)
    sides[:, slice(None) if axes is None else axes] = sizes.reshape(2, -1)
    return None if sides[:, :2].any() else [int(n) for n in sides[:, 2:].reshape(-1)]


def fold_affine(draft: Draft) -> None:
    """Fold what multiplies a Conv's channels by constants, or adds constants to them, in a loaded
    ONNX file into its weight and bias: BatchNormalization, Mul, Div, Add and Sub, in float64,
    rounded once."""
    readers, gone = draft.readers(), set[str]()
    for node in [n for n in draft.nodes if _is(n, "Conv")]:
        weight, (bias,) = draft.constants.get(node.inputs[1]), (*node.inputs[2:], "")[:1]
        if weight is None or bias not in ("", *draft.constants) or len(readers[node.inputs[1]]) > 1:
            continue
        factor, shift = np.ones(len(weight)), np.zeros(len(weight))
        shift += draft.constants[bias] if bias else 0
        folded, tensor = [], node.outputs[0]
        while (behind := draft.alone(tensor, readers)) and (
            step := _affine(behind, tensor, weight, draft)
        ):
            factor, shift = factor * step[0], shift * step[0] + step[1]
            folded.append(behind)
            tensor = behind.outputs[0]
        if not folded or not (np.isfinite(factor).all() and np.isfinite(shift).all()):
            continue
        own = bool(bias) and len(readers[bias]) == 1
        name = bias if own else draft.fresh(f"{node.inputs[1]}/bias")
        by_channel = factor.reshape(-1, *(1 for _ in weight.shape[1:]))
        draft.constants[node.inputs[1]] = (weight * by_channel).astype(np.float32)
        draft.constants[name] = shift.astype(np.float32)
        node.inputs, node.outputs = [*node.inputs[:2], name], [tensor]
        gone |= {n.name for n in folded}
    draft.nodes = [n for n in draft.nodes if n.name not in gone]


def _affine(node: Operator, tensor: str, weight: Array, draft: Draft) -> tuple[Array, Array] | None:
    """Return (factor, shift) by channel of a loaded ONNX file's node that reads a Conv's output
    `tensor`; None of others."""
    values = [draft.constants.get(name) for name in node.inputs if name != tensor]
    if node.domain or any(v is None for v in values) or any(node.outputs[1:]):
        return None
    wide = [np.asarray(v, np.float64) for v in values]
    if node.op == "BatchNormalization" and not node.attributes.get("training_mode"):
        gamma, beta, mean, var = wide
        factor = gamma / np.sqrt(var + node.attributes.get("epsilon", 1e-5))
        return factor, beta - mean * factor
    channels = (len(weight), *(1 for _ in weight.shape[2:]))
    if len(wide) != 1 or wide[0].size not in (1, len(weight)) or wide[0].ndim > weight.ndim:
        return None
    shape = wide[0].shape[-len(channels) :]
    if wide[0].size > 1 and (shape != channels):
        return None
    number, zero = wide[0].reshape(-1), np.zeros(1)
    first = node.inputs[0] == tensor
    if node.op == "Mul":
        return number, zero
    if node.op == "Add":
        return zero + 1, number
    if node.op == "Sub":
        return (zero + 1, -number) if first else (zero - 1, number)
    return (1 / number, zero) if node.op == "Div" and first and number.all() else None


def find_products(draft: Draft) -> None:
    """Turn a MatMul or Gemm of a loaded ONNX file by a constant matrix, with a constant that is
    added behind it, into a Linear, and a Conv of images by constant filters into a Conv2d."""
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
    """Turn a Conv of a loaded ONNX file by constant filters, without automatic padding, into a
    Conv2d, in place."""
    weight = draft.constants.get(node.inputs[1])
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    a = node.attributes
    if weight is None or weight.ndim != 4 or len(readers[node.inputs[1]]) > 1:
        return
    if (bias and bias not in draft.constants) or a.get("auto_pad", "NOTSET") not in UNPADDED:
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
    """Turn a Gemm of a loaded ONNX file by a constant float32 matrix into a Linear, in place;
    others stay."""
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
    """Turn a MatMul of a loaded ONNX file by a constant matrix, with an Add of a constant behind
    it, into a Linear."""
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
    """Return True for an initializer of a loaded ONNX file that is a parameter of the model:
    floats, more than one."""
    return array.dtype == np.float32 and array.ndim > 0 and array.size > 1


def _linear(node: Operator, weight: str, bias: str) -> None:
    node.op, node.module, node.bias = LINEAR, weight, bias
    node.inputs, node.attributes = node.inputs[:1], {}


def free_names(draft: Draft) -> None:
    """Rename operators of a loaded ONNX file, and tensors between them, whose names begin as those
    of parameters do."""
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
    """Add to a loaded ONNX file the constant `name` times a factor, rounded once."""
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
