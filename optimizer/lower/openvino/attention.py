"""Fuse each attention of a decoder to Attention, an ONNX operator since opset 23.

OpenVINO reads it as ScaledDotProductAttention, which its CPU plugin joins with an in-place KV cache
and OpenVINO GenAI turns into paged attention; it does neither for separate products and softmax.
Mask, scale, rotation and the KV cache's Concat stay, so any mask is accepted.

Paged attention hides later tokens and has no other mask or padding. It computes the graph's outputs
where every attention is fused, every mask is causal (lower/onnx/causal_mask.py) and positions are
inputs; otherwise `unpaged` has the reason. Keys and values are repeated for their query heads
before the operator, the pattern that OpenVINO's fusion finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from optimizer.export.scopes import MODULE, module_of
from optimizer.harness.inputs.kv_cache import past_name
from optimizer.lower.onnx.attention_pattern import Attention, Fused, OtherPattern, recognise
from optimizer.lower.onnx.causal_mask import NOT_CAUSAL, is_causal
from optimizer.lower.onnx.examine import take_over

OPSET = 23


def fuse(model: ir.Model, context: int) -> tuple[Fused, str]:
    """Fuse a decoder's attentions for OpenVINO: rewrite `model` in place with its opset, which
    changes no other operator. Returns also the reason why the KV cache cannot be paged, or "".

    context: maximum tokens of a sequence
    """
    inputs = {str(v.name): v for v in model.graph.inputs}
    outputs = {str(v.name): v for v in model.graph.outputs}
    done, left, masks, index = [], {}, set[ir.Value](), 0
    while past_name(index, "key") in inputs:
        try:
            attention = recognise(inputs, outputs, index)
            _rewrite(model, attention)
            masks.add(attention.mask)
            done.append(module_of(attention.softmax))
        except OtherPattern as e:
            left[f"layer {index}"] = str(e)
        index += 1
    if done:
        model.opset_imports[""] = OPSET
    RemoveUnusedNodesPass()(model)
    model.graph.sort()
    return Fused(tuple(done), left), _unpaged(model, left, masks, context)


def _unpaged(
    model: ir.Model, left: Mapping[str, str], masks: Iterable[ir.Value], context: int
) -> str:
    if left:
        return f"the attention of {next(iter(left))} runs in plain operators"
    if not {"input_ids", "position_ids"} <= {str(v.name) for v in model.graph.inputs}:
        return "the graph takes no position_ids"
    return "" if all(is_causal(model, mask, context) for mask in masks) else NOT_CAUSAL


def _rewrite(model: ir.Model, attention: Attention) -> None:
    module = module_of(attention.softmax)
    node = ir.node(
        "Attention",
        [attention.query, *attention.repeated, attention.mask],
        {"scale": attention.scale},
        name=f"{module}/Attention",
        metadata_props={MODULE: module},
    )
    model.graph.insert_before(attention.weighted, node)
    take_over(attention.weighted.outputs[0], node.outputs[0])
