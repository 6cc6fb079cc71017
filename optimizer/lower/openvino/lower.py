"""Lower for OpenVINO, in float32, with ONNX's Attention for a decoder.

OpenVINO reads both dialects and keeps both in integer kernels. Static ranges go into ort_qdq: its
unsigned integers are what products of uint8 by int8 take, where a processor has no products of
int8 by int8 (docs/decisions/0015). Weights alone go into trt_qdq, whose
weight is one for all of its uses.
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
    "OpenVINO stores their zeros and multiplies by them, so that neither the file nor the time is "
    "less for it"
)


def lower(section: OpenVinoTarget, source: Path, state: Path, graph: Path, out: Path) -> None:
    """See stage.run."""
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
    """A decoder's attentions as one operator each, in place; what of it."""
    if not tasks.of(contract).generates:
        return None
    fused = openvino_attention.fuse(model, contract.decoder.context)
    for layer, why in list(fused.left.items())[:3]:
        say(f"lower: attention of {layer} runs in plain operators, slower: {why}")
    return {"fused": list(fused.modules), "left": dict(fused.left), "unpaged": fused.unpaged}
