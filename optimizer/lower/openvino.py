"""Lower for OpenVINO: trt_qdq in float32.

OpenVINO reads both dialects and keeps both in integer kernels; signed integers with the offset in
the bias are a little faster there than unsigned ones with a zero point (docs/decisions.md).
"""

from __future__ import annotations

from pathlib import Path

from optimizer.lower import onnx_lowering, trt_qdq
from optimizer.lower.onnx_lowering import Lowered
from optimizer.recipe.schema import OpenVinoTarget

ZEROS = (
    "OpenVINO stores their zeros and multiplies by them, so that neither the file nor the time is "
    "less for it"
)


def lower(section: OpenVinoTarget, _source: Path, state: Path, graph: Path, out: Path) -> None:
    """See stage.run."""
    model, names, compressed = onnx_lowering.read(graph, state)
    activations = trt_qdq.lower(model, names, compressed, section.float_type)
    lowered = Lowered("trt_qdq", model, activations, zeros=ZEROS)
    onnx_lowering.write(lowered, names, compressed, section.float_type, out)
