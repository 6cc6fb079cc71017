"""Lower to ort_qdq, the dialect of ONNX Runtime, with its operators for attention, and on a CPU for
a product and its bias and for swish."""

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
from optimizer.lower.onnx.optional import adapters, last_logits
from optimizer.lower.ort import (
    answer,
    encoder_attention,
    norm,
    pack,
    past_length,
    product,
    qdq,
    sequence_first,
    swish,
)
from optimizer.lower.ort import attention as ort_attention
from optimizer.recipe.schema import OnnxRuntimeTarget

ZEROS = (
    "ONNX Runtime stores their zeros and multiplies by them, so sparsity saves neither space nor "
    "time; an archive of the file is smaller"
)


def lower(section: OnnxRuntimeTarget, source: Path, state: Path, graph: Path, out: Path) -> None:
    """Lower for ONNX Runtime: write model.onnx and lowering.json into `out`; arguments as in
    lower/stage.run."""
    model, names, compressed = onnx_lowering.read(graph, state)
    contract = contracts.read(source / "contract.json")
    generates = tasks.look_up(contract).generates
    attention = _decoder(model, section, contract) if generates else None
    activations = qdq.lower(model, names, compressed, section.float_type)
    if section.device == "cpu":
        if not generates and section.fuse_attention:
            encoder_attention.fuse(model)
            sequence_first.rearrange(model)
        product.fuse(model)
        swish.fuse(model)
    elif section.provider is None and not generates:
        if section.fuse_attention:
            encoder_attention.fuse(model, biased=True)
        if left := answer.add(model, contract):
            say(f"lower: the embedding is pooled on the host, not in the graph: {left}")
    adapted = adapters.read_widths(source)
    packed = pack.pack(model) if attention and not adapted else {}
    adapters.add(model, adapted, names.modules)
    if generates and section.provider is None and (left := last_logits.add(model)):
        say(f"lower: each step computes the logits of all its tokens: {left}")
    lowered = Lowered("ort_qdq", model, activations, packed, attention, ZEROS)
    onnx_lowering.write(lowered, names, compressed, section.float_type, out)


def _decoder(model: ir.Model, section: OnnxRuntimeTarget, contract: Contract) -> dict[str, Any]:
    """Fuse a decoder's attentions and norms in place for ONNX Runtime. Returns `attention` of
    lowering.json."""
    if not section.fuse_attention:
        return {"fused": [], "left": {"all": "fuse_attention: false"}}
    if section.provider is not None:
        why = f"provider {section.provider} takes ONNX's operators"
        return {"fused": [], "left": {"all": why}}
    if section.device == "cuda" and section.float_type == "fp32":
        why = "ONNX Runtime's GroupQueryAttention runs fp32 on the CPU, not on CUDA"
        return {"fused": [], "left": {"all": why}}
    fused = ort_attention.fuse(model, contract.decoder.context)
    if ort_attention.SHARED in model.metadata_props.items():
        others = past_length.measure_by_row(model)
        if others:
            del model.metadata_props[ort_attention.SHARED[0]]
            say(f"lower: {others[0]} reads the KV cache's shape: past and present share no buffer")
    norm.fuse(model)
    for layer, why in list(fused.left.items())[:3]:
        say(f"lower: attention of {layer} runs in plain operators, slower: {why}")
    return {"fused": list(fused.modules), "left": dict(fused.left)}
