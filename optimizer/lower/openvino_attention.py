"""Each attention of a decoder as one Attention, ONNX's own operator since opset 23.

OpenVINO reads it as its ScaledDotProductAttention. That operator is what its CPU plugin joins with
a cache that stays in place, and what OpenVINO GenAI turns into paged attention; of the products and
the softmax that make the same function it does neither. Mask, scale, rotation and the cache's
Concat stay as the graph has them, so nothing of what they mean is assumed: any mask is taken.

Keys and values are repeated for their groups of query heads before the operator, as in the graph:
OpenVINO's fusion finds that form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from optimizer.export.clean import MODULE, module_of
from optimizer.harness.kv_cache import past_name
from optimizer.lower.attention_form import Attention, OtherForm, recognise
from optimizer.lower.examine import take_over

OPSET = 23


@dataclass(frozen=True)
class Fused:
    """modules: attentions that became the operator. left: {attention: why it did not}."""

    modules: tuple[str, ...]
    left: Mapping[str, str]


def fuse(model: ir.Model) -> Fused:
    """Rewrite `model` in place, and its opset, which changes the meaning of no other operator."""
    inputs = {str(v.name): v for v in model.graph.inputs}
    outputs = {str(v.name): v for v in model.graph.outputs}
    done, left, index = [], {}, 0
    while past_name(index, "key") in inputs:
        try:
            attention = recognise(inputs, outputs, index)
            _rewrite(model, attention)
            done.append(module_of(attention.softmax))
        except OtherForm as e:
            left[f"layer {index}"] = str(e)
        index += 1
    if done:
        model.opset_imports[""] = OPSET
    RemoveUnusedNodesPass()(model)
    model.graph.sort()
    return Fused(tuple(done), left)


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
