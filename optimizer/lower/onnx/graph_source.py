"""Open a graph once for many readers, with packed products unpacked and ranks inferred."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from optimizer.export import onnx_file
from optimizer.lower.ort import pack, product, swish

# ONNX Runtime's own operators, whose outputs' ranks onnx cannot infer.
RANKS = {
    "GroupQueryAttention": (3, 4, 4),
    "MultiHeadAttention": (3,),
    "SkipSimplifiedLayerNormalization": (3, 3, 3, 3),
    "SimplifiedLayerNormalization": (3, 3),
    swish.OPERATOR: (4,),  # outputs of convolutions
}
# An operator whose output has its input's rank: 3 for positions in a row, 4 for rows and columns.
KEEPS_RANK, READ = product.OPERATOR, (3, 4)


@dataclass(frozen=True)
class OpenGraph:
    """Lowered graph that was read once for many readers, which do not change it."""

    path: Path
    model: ir.Model


Source = Path | OpenGraph
"""Graph on disk, or one that the caller opened."""


def open_graph(path: Path) -> OpenGraph:
    """Open the lowered graph at `path` with packed products unpacked and ranks inferred."""
    first = model = _read_graph(path, READ[0])
    for rank in READ[1:]:
        if _consistent(model):
            return OpenGraph(path, model)
        model = _read_graph(path, rank)
    return OpenGraph(path, model if _consistent(model) else first)


def _read_graph(path: Path, read: int) -> ir.Model:
    """Read a lowered graph, unpack its products and infer ranks.

    read: assumed rank of the outputs of operators of type KEEPS_RANK, whose rank cannot be inferred
    """
    model = onnx_file.load(path)
    pack.unpack(model)
    ranks = {**RANKS, KEEPS_RANK: (read,)}
    half = any(v.dtype == ir.DataType.FLOAT16 for v in model.graph.initializers.values())
    kind = ir.TensorType(ir.DataType.FLOAT16 if half else ir.DataType.FLOAT)
    for node in model.graph:
        for value, rank in zip(node.outputs, ranks.get(node.op_type, ()), strict=False):
            if value.shape is None:
                value.shape = ir.Shape([None] * rank)
            value.type = value.type or kind
    ShapeInferencePass()(model)
    return model


def _consistent(model: ir.Model) -> bool:
    """Test that inferred ranks of a lowered graph agree: input and output of each operator
    KEEPS_RANK have one number of axes."""
    pairs = [(n.inputs[0], n.outputs[0]) for n in model.graph if n.op_type == KEEPS_RANK]
    shapes = [(x.shape, y.shape) for x, y in pairs if x is not None]
    return all(x is not None and y is not None and len(x) == len(y) for x, y in shapes)


def open_model(source: Source) -> ir.Model:
    """Return the ONNX model of a lowered graph that is open already, or open it where the caller
    has a path."""
    return source.model if isinstance(source, OpenGraph) else open_graph(source).model


def place_of(source: Source) -> str:
    """Return the path of the file that a lowered graph was read from, for messages."""
    return str(source.path if isinstance(source, OpenGraph) else source)
