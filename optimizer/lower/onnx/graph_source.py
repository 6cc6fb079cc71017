"""A graph that many look at, read once: packed products unpacked, ranks known."""

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
    swish.OPERATOR: (4,),  # of what convolutions give
}
# Of one that gives the rank it reads: of positions in a row, or in rows and columns.
KEEPS_RANK, READ = product.OPERATOR, (3, 4)


@dataclass(frozen=True)
class Opened:
    """A graph that was read once, to be looked at by many. Nothing here changes it."""

    path: Path
    model: ir.Model


Source = Path | Opened
"""A graph on disk, or one that the caller has opened."""


def opened(path: Path) -> Opened:
    """The graph at `path`, packed products unpacked, with every value's rank that can be known."""
    first = model = _opened(path, READ[0])
    for rank in READ[1:]:
        if _consistent(model):
            return Opened(path, model)
        model = _opened(path, rank)
    return Opened(path, model if _consistent(model) else first)


def _opened(path: Path, read: int) -> ir.Model:
    """read: the rank that is supposed of what KEEPS_RANK reads."""
    model = onnx_file.load(path)
    pack.unpack(model)
    ranks = {**RANKS, KEEPS_RANK: (read,)}
    for node in model.graph:
        for value, rank in zip(node.outputs, ranks.get(node.op_type, ()), strict=False):
            if value.shape is None:
                value.shape = ir.Shape([None] * rank)
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    ShapeInferencePass()(model)
    return model


def _consistent(model: ir.Model) -> bool:
    """Whether what was supposed of each such product is so."""
    pairs = [(n.inputs[0], n.outputs[0]) for n in model.graph if n.op_type == KEEPS_RANK]
    shapes = [(x.shape, y.shape) for x, y in pairs if x is not None]
    return all(x is not None and y is not None and len(x) == len(y) for x, y in shapes)


def model_of(source: Source) -> ir.Model:
    """The graph, opened here where the caller has it on disk only."""
    return source.model if isinstance(source, Opened) else opened(source).model


def place_of(source: Source) -> str:
    """For a message."""
    return str(source.path if isinstance(source, Opened) else source)
