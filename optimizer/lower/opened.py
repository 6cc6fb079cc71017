"""A graph that many look at, read once: packed products unpacked, ranks known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from optimizer.export import onnx_file
from optimizer.lower import ort_pack

# ONNX Runtime's own operators, whose outputs' ranks onnx cannot infer.
RANKS = {
    "GroupQueryAttention": (3, 4, 4),
    "MatMulIntegerToFloat": (3,),
    "SkipSimplifiedLayerNormalization": (3, 3, 3, 3),
    "SimplifiedLayerNormalization": (3, 3),
}


@dataclass(frozen=True)
class Opened:
    """A graph that was read once, to be looked at by many. Nothing here changes it."""

    path: Path
    model: ir.Model


Source = Path | Opened
"""A graph on disk, or one that the caller has opened."""


def opened(path: Path) -> Opened:
    """The graph at `path`, packed products unpacked, with every value's rank that can be known."""
    model = onnx_file.load(path)
    ort_pack.unpack(model)
    for node in model.graph:
        for value, rank in zip(node.outputs, RANKS.get(node.op_type, ()), strict=False):
            if value.shape is None:
                value.shape = ir.Shape([None] * rank)
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    ShapeInferencePass()(model)
    return Opened(path, model)


def model_of(source: Source) -> ir.Model:
    """The graph, opened here where the caller has it on disk only."""
    return source.model if isinstance(source, Opened) else opened(source).model


def place_of(source: Source) -> str:
    """For a message."""
    return str(source.path if isinstance(source, Opened) else source)
