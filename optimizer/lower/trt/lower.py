"""Lower to trt_qdq, the dialect of the TensorRT family."""

from __future__ import annotations

from pathlib import Path

from optimizer.lower.onnx import onnx_lowering
from optimizer.lower.onnx.onnx_lowering import Lowered
from optimizer.lower.trt import qdq
from optimizer.recipe.schema import TensorRTTarget

ZEROS = (
    "the ONNX file is dense; TensorRT has kernels for 2:4 sparse weights, which it uses where they "
    "are faster, and for no other pattern"
)


def lower(section: TensorRTTarget, _source: Path, state: Path, graph: Path, out: Path) -> None:
    """Lower for TensorRT: write model.onnx and lowering.json into `out`; arguments as in
    lower/stage.run."""
    model, names, compressed = onnx_lowering.read(graph, state)
    activations = qdq.lower(model, names, compressed, section.float)
    lowered = Lowered("trt_qdq", model, activations, zeros=ZEROS)
    onnx_lowering.write(lowered, names, compressed, section.float_type, out)
