"""Each attention of a decoder as one Attention, ONNX's own operator since opset 23.

OpenVINO reads it as its ScaledDotProductAttention. That operator is what its CPU plugin joins with
a cache that stays in place, and what OpenVINO GenAI turns into paged attention; of the products and
the softmax that make the same function it does neither. Mask, scale, rotation and the cache's
Concat stay as the graph has them, so nothing of what they mean is assumed: any mask is taken.

Paged attention has no mask: it hides what comes after a token, and texts have no padding. It gives
the graph's answers where every attention is such an operator and every mask is causal
(lower/onnx/causal_mask.py), and where positions are given; otherwise `unpaged` says what is in the
way.

Keys and values are repeated for their groups of query heads before the operator, as in the graph:
OpenVINO's fusion finds that form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from optimizer.export.scopes import MODULE, module_of
from optimizer.harness.inputs.kv_cache import past_name
from optimizer.lower.onnx.attention_form import Attention, OtherForm, recognise
from optimizer.lower.onnx.causal_mask import NOT_CAUSAL, is_causal
from optimizer.lower.onnx.examine import take_over

OPSET = 23


@dataclass(frozen=True)
class Fused:
    """modules: attentions that became the operator. left: {attention: why it did not}. unpaged: why
    the cache cannot be paged, or ""."""

    modules: tuple[str, ...]
    left: Mapping[str, str]
    unpaged: str


def fuse(model: ir.Model, context: int) -> Fused:
    """Rewrite `model` in place, and its opset, which changes the meaning of no other operator.
    context: the longest sequence it may be given."""
    inputs = {str(v.name): v for v in model.graph.inputs}
    outputs = {str(v.name): v for v in model.graph.outputs}
    done, left, masks, index = [], {}, set[ir.Value](), 0
    while past_name(index, "key") in inputs:
        try:
            attention = recognise(inputs, outputs, index)
            _rewrite(model, attention)
            masks.add(attention.mask)
            done.append(module_of(attention.softmax))
        except OtherForm as e:
            left[f"layer {index}"] = str(e)
        index += 1
    if done:
        model.opset_imports[""] = OPSET
    RemoveUnusedNodesPass()(model)
    model.graph.sort()
    return Fused(tuple(done), left, _unpaged(model, left, masks, context))


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
