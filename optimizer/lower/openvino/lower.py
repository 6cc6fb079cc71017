"""Lower for OpenVINO, in float32, with ONNX's Attention for a decoder.

OpenVINO runs both dialects in integer kernels. Static ranges use ort_qdq: processors without
products of int8 by int8 need its unsigned integers (docs/decisions/0015).
Weights alone use trt_qdq, which stores a shared weight once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from optimizer.foundation.progress import say
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.lower.onnx import onnx_lowering
from optimizer.lower.onnx.onnx_lowering import Lowered
from optimizer.lower.openvino import attention as openvino_attention
from optimizer.lower.openvino import transpose
from optimizer.lower.ort import qdq as ort_qdq
from optimizer.lower.trt import qdq as trt_qdq
from optimizer.recipe.schema import OpenVinoTarget

ZEROS = (
    "OpenVINO stores their zeros and multiplies by them, so sparsity saves neither space nor time"
)


def lower(section: OpenVinoTarget, source: Path, state: Path, graph: Path, out: Path) -> None:
    """Lower for OpenVINO: write model.onnx and lowering.json into `out`; arguments as in
    lower/stage.run."""
    model, names, compressed = onnx_lowering.read(graph, state)
    attention = _decoder(model, contracts.read(source / "contract.json"))
    transpose.split(model)
    if compressed.activations == "tensor":
        dialect, activations = "ort_qdq", ort_qdq.lower(model, names, compressed)
    else:
        dialect, activations = (
            "trt_qdq",
            trt_qdq.lower(model, names, compressed, section.float_type),
        )
    lowered = Lowered(dialect, model, activations, attention=attention, zeros=ZEROS)
    onnx_lowering.write(lowered, names, compressed, section.float_type, out)


def _decoder(model: ir.Model, contract: Contract) -> dict[str, Any] | None:
    """Fuse a decoder's attentions in place for OpenVINO. Returns `attention` of lowering.json."""
    if not tasks.look_up(contract).generates:
        return None
    fused, unpaged = openvino_attention.fuse(model, contract.decoder.context)
    for layer, why in list(fused.left.items())[:3]:
        say(f"lower: attention of {layer} runs in plain operators, slower: {why}")
    return {"fused": list(fused.modules), "left": dict(fused.left), "unpaged": unpaged}
