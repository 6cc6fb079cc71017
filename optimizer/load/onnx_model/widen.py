"""Convert a file in float16 to float32, which holds every value of float16, and run the file as it
is for comparison.

Weights, attributes, inputs, outputs and casts become float32. Later stages compare with the
converted file; `load` compares that with the file as it is, under the limit of arithmetic that
stores each result in float16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, TensorProto, numpy_helper

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.rounding.random_rounding import Arithmetic
from optimizer.foundation.rounding.tolerance import UNIT
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.load.onnx_model.draft import Array
from optimizer.load.onnx_model.files import tensors
from optimizer.load.onnx_model.reference import Answers

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT
TYPES = ("to", "dtype")
"""Attributes that name the type of a result."""


def is_half(model: onnx.ModelProto) -> bool:
    """Return True for an ONNX file that computes in float16, which load converts: a tensor, an
    input, an output or the result of a Cast."""
    ports = (*model.graph.input, *model.graph.output)
    attributes = (a for node in model.graph.node for a in node.attribute)
    return (
        any(t.data_type == HALF for t in tensors(model))
        or any(p.type.tensor_type.elem_type == HALF for p in ports)
        or any(a.name in TYPES and a.i == HALF for a in attributes)
    )


def widen(model: onnx.ModelProto, arrays: dict[str, Array]) -> None:
    """Convert a loaded float16 ONNX file to float32: a model, whose attributes are loaded, and its
    initializers, in place."""
    for name, array in arrays.items():
        if array.dtype == np.float16:
            arrays[name] = array.astype(np.float32)
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == HALF:
            value.type.tensor_type.elem_type = FLOAT
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Iterable[Any]) -> None:
    for attribute in (a for node in nodes for a in node.attribute):
        if attribute.type == AttributeProto.TENSOR and attribute.t.data_type == HALF:
            wide = numpy_helper.to_array(attribute.t).astype(np.float32)
            attribute.t.CopyFrom(numpy_helper.from_array(wide, attribute.t.name))
        elif attribute.name in TYPES and attribute.i == HALF:
            attribute.i = FLOAT


def write(model: onnx.ModelProto, arrays: Mapping[str, Array], file: Path) -> None:
    """Write an ONNX file that load converted from float16, with its initializers as external
    data."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    del whole.graph.initializer[:]
    for name, array in arrays.items():
        whole.graph.initializer.append(numpy_helper.from_array(array, name))
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(whole, file, save_as_external_data=True, location=f"{file.name}.data")


class HalfFile:
    """A float16 ONNX file as it is, in ONNX Runtime, which load compares with: inputs and outputs
    are converted."""

    name = "the file in float16"
    arithmetic = Arithmetic(unit=UNIT["fp16"], operands=True)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.example: Mapping[str, torch.Tensor] = {}

    def answers(self, inputs: Mapping[str, Any]) -> Answers:
        """Return {output: array} of a batch through the float16 ONNX file as it is."""
        with OrtRunner(self.path, threads=1, fuse=False) as runner:
            types = runner.inputs
            results = runner.infer(
                {n: a.astype(types.get(n) or a.dtype) for n, a in inputs.items()}
            )
        wide = {n: a.astype(np.float32) for n, a in results.items() if a.dtype == np.float16}
        for name, array in wide.items():
            if not np.isfinite(array).all():
                raise CheckpointError(
                    f"output {name!r} of drawn rows holds NaN or infinity in float16",
                    where=str(self.path),
                    accepted="a file whose values stay below 65504",
                    fix="Give the file in float32, or set model.ranges to values that it takes.",
                )
        return {**results, **wide}
