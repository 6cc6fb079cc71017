"""Refuse ONNX files that are damaged, quantized already or not covered; messages name the node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, TensorProto
from onnx.checker import ValidationError

from optimizer.foundation.errors import CheckpointError
from optimizer.load.onnx_model.draft import Draft
from optimizer.load.onnx_model.files import tensors
from optimizer.load.onnx_model.passes import TURNED

QUANTIZED = (
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger"),
    *("ConvInteger", "MatMulNBits", "GatherBlockQuantized", "DynamicQuantizeMatMul"),
    *("MatMulIntegerToFloat", "QGemm", "QAttention", "MatMulBnb4", "MatMulFpQ4"),
)
"""Operators of files that are quantized already, besides those whose names begin with QLinear."""
RANDOM = (
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    *("Bernoulli", "Multinomial"),
)
UNREAD = (TensorProto.BFLOAT16, TensorProto.DOUBLE)
OPSETS = range(7, 25)


def check(model: ModelProto, path: Path) -> None:
    """Refuse an ONNX file at load: raise CheckpointError for the first fault of `model`, or part
    that is not covered."""
    _check_opsets(model, path)
    check_nodes(model, path)
    _check_order(model, path)
    _check_structure(model, path)
    for value in model.graph.input:
        _check_port(value, f"{path}: input {value.name!r}")
    for value in model.graph.output:
        _check_port(value, f"{path}: {output(value.name, model)}")


def check_nodes(model: ModelProto, path: Path) -> None:
    """Refuse an ONNX file at load: raise CheckpointError for the first node or type of a tensor
    that is not loaded."""
    for node in model.graph.node:
        _check_node(node, path)
    for tensor in tensors(model):
        if tensor.data_type in UNREAD:
            name = tensor.name or _owner(tensor, model)
            reader = next((n for n in model.graph.node if name in n.input), None)
            raise CheckpointError(
                f"{name!r} is {TensorProto.DataType.Name(tensor.data_type).lower()}",
                where=f"{path}{f': {label(reader)}' if reader is not None else ''}",
                accepted="weights in float32 or float16",
                fix="Export the model in float32.",
            )


def _owner(tensor: TensorProto, model: ModelProto) -> str:
    """Find in an ONNX file the output of the node that has this tensor without a name as an
    attribute; "" for none."""
    nodes = (n for n in model.graph.node for a in n.attribute if a.HasField("t") and a.t == tensor)
    return next((str(node.output[0]) for node in nodes), "")


def check_random(draft: Draft, path: Path) -> None:
    """Refuse an ONNX file at load: raise CheckpointError for a node that draws its result, so that
    no two answers agree."""
    for node in draft.nodes:
        training = draft.constants.get((*node.inputs, "", "", "")[2])
        drops = node.op == "Dropout" and training is not None and training.any()
        if drops or node.op in RANDOM:
            raise CheckpointError(
                "it draws its result at random",
                where=f"{path}: node {node.name!r} ({node.op})",
                accepted="a model whose answer depends on its inputs only",
                fix="Export the model in evaluation mode.",
            )


def _check_opsets(model: ModelProto, path: Path) -> None:
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version not in OPSETS:
            raise CheckpointError(
                f"opset {entry.version}",
                where=str(path),
                accepted=f"opset {OPSETS[0]} to {OPSETS[-1]}",
                fix="Export the model with another opset_version.",
            )


def _check_node(node: Any, path: Path) -> None:
    """Refuse an ONNX file at load: raise CheckpointError for a node of a quantized file, and for
    one with control flow."""
    where = f"{path}: {label(node)}"
    if node.op_type in QUANTIZED or node.op_type.startswith("QLinear"):
        raise CheckpointError(
            f"the file is quantized already ({node.op_type})",
            where=where,
            accepted="the float model that it was made from",
        )
    for attribute in node.attribute:
        if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
            raise CheckpointError(
                f"{node.op_type} runs a graph of its own, which depends on values",
                where=where,
                accepted="graphs without control flow (If, Loop, Scan)",
                fix="Export the model by tracing one path.",
            )


def label(node: Any) -> str:
    """Describe a node of a refused ONNX file for a message: its name, else its first output, and
    its operator."""
    first = next((n for n in node.output if n), "")
    return (
        f"node {node.name!r} ({node.op_type})"
        if node.name
        else f"node of {first!r} ({node.op_type})"
    )


def _check_order(model: ModelProto, path: Path) -> None:
    """Refuse an ONNX file at load: raise CheckpointError for a tensor that is read before it is
    made, naming the node: a graph with a circle, or without an order."""
    graph = model.graph
    known = {"", *(i.name for i in graph.input), *(t.name for t in graph.initializer)}
    known |= {t.values.name for t in graph.sparse_initializer}
    outputs = {name for node in graph.node for name in node.output}
    for node in graph.node:
        for name in node.input:
            if name in known:
                continue
            problem = f"reads {name!r}, which no node makes"
            if name in outputs:
                problem = (
                    f"reads {name!r} before it is made: the nodes form a circle or have no order"
                )
            raise CheckpointError(
                problem,
                where=f"{path}: {label(node)}",
                accepted="nodes in the order in which they run",
            )
        again = [name for name in node.output if name and name in known]
        if again:
            raise CheckpointError(
                f"makes {again[0]!r} a second time", where=f"{path}: {label(node)}"
            )
        known |= set(node.output)
    missing = [o.name for o in graph.output if o.name not in known]
    if missing:
        raise CheckpointError(f"no node makes output {missing[0]!r}", where=str(path))


def _check_structure(model: ModelProto, path: Path) -> None:
    """Refuse an ONNX file at load: raise CheckpointError for sparse weights, and for a file that
    onnx.checker refuses."""
    if model.graph.sparse_initializer:
        name = model.graph.sparse_initializer[0].values.name
        raise CheckpointError(
            f"weight {name!r} is sparse", where=str(path), accepted="dense weights"
        )
    try:
        onnx.checker.check_model(str(path))
    except (ValidationError, ValueError, RuntimeError) as e:
        raise CheckpointError(
            f"onnx.checker refuses it ({' '.join(str(e).split())[:300]})",
            where=place(path, str(e), model),
            fix="Export the model again.",
        ) from None


def place(path: Path, words: str, model: ModelProto) -> str:
    """Describe the refused ONNX file for a message, with the node that a library's error names.

    words: text of the library's error
    """
    for node in model.graph.node:
        own = (f"({node.name})", f"'{node.name}'", f"Name: {node.name} ") if node.name else ()
        if any(text in words for text in (*own, f"{node.domain}:{node.op_type}(")):
            return f"{path}: {label(node)}"
    return str(path)


def output(name: str, model: ModelProto) -> str:
    """Describe an output of the refused ONNX file for a message, with the node that computes it."""
    maker = next((node for node in model.graph.node if name in node.output), None)
    if maker is None:
        return f"output {name!r}"
    return f"output {name!r} {f'of {label(maker)}' if maker.name else f'({maker.op_type})'}"


def _check_port(value: Any, where: str) -> None:
    if not value.type.HasField("tensor_type"):
        raise CheckpointError("it is not a tensor", where=where, accepted="a tensor")
    for dim in value.type.tensor_type.shape.dim:
        if dim.HasField("dim_value") and dim.dim_value < 1:
            raise CheckpointError(
                f"an axis has size {dim.dim_value}", where=where, accepted="sizes of 1 or more"
            )


def check_finite(draft: Draft, path: Path) -> None:
    """Refuse an ONNX file at load: raise CheckpointError for infinity in the weight of a module."""
    for node in draft.nodes:
        if node.module and not np.isfinite(draft.constants[node.module]).all():
            raise CheckpointError(
                f"weight {node.module.removesuffix(TURNED)!r} holds infinity",
                where=f"{path}: node {node.name!r}",
                accepted="finite numbers",
                fix="Export the model again, from weights that are finite.",
            )


def holds_nan(array: Any) -> bool:
    """Return True for an array of floats in a loaded ONNX file of which one is NaN."""
    return array.dtype.kind == "f" and bool(np.isnan(array).any())


def check_values(arrays: Mapping[str, Any], nodes: Iterable[Any], path: Path) -> None:
    """Refuse an ONNX file at load: raise CheckpointError for a weight that holds NaN or has an axis
    of size 0, naming a node that reads it. Infinity is accepted, because masks have it. arrays:
    initializers by name"""
    readers: dict[str, Any] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, node)
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            continue
        reader = f", read by {label(readers[name])}" if name in readers else ""
        if array.ndim > 1 and not array.size:
            raise CheckpointError(
                f"weight {name!r} has shape {array.shape}{reader}",
                where=str(path),
                accepted="axes of size 1 or more",
            )
        if holds_nan(array):
            raise CheckpointError(
                f"weight {name!r} holds NaN{reader}",
                where=str(path),
                accepted="finite numbers",
                fix="Export the model again, from weights that are finite.",
            )
