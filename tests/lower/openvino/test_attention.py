from __future__ import annotations

import onnx_ir as ir
import pytest

from optimizer.lower.openvino import attention
from tests.lower.decoder_graphs import answers, text
from tests.lower.ort.test_attention import CONTEXT, Decoders
from tests.lower.running import difference

ROUNDING = 3e-6  # relative L2: float32 sums in another order


@pytest.mark.parametrize("kind", ["llama", "heads normed", "learned positions", "window"])
def test_the_operator_computes_what_it_replaces(decoders: Decoders, kind: str) -> None:
    """Any mask is kept, a sliding window's too."""
    made, given, pieces = decoders(kind), text(80, (0, 4)), (70, 8, 1, 1)
    model = made.model
    fused, _ = attention.fuse(model, CONTEXT)
    found = [n.op_type for n in model.graph]
    assert not fused.left
    assert found.count("Attention") == len(fused.modules) > 0
    assert "Softmax" not in found
    assert difference(answers(model, given, pieces), answers(made.model, given, pieces)) < ROUNDING


def test_a_layer_of_another_form_is_left_and_told(decoders: Decoders) -> None:
    model = decoders("llama").model
    softmax = next(n for n in model.graph if n.op_type == "Softmax")
    weights = softmax.outputs[0]
    halved = ir.node("Mul", [weights, weights], name="squared")
    ir.convenience.replace_all_uses_with(weights, halved.outputs[0])
    for i in range(2):
        halved.replace_input_with(i, weights)
    model.graph.insert_after(softmax, halved)
    fused, unpaged = attention.fuse(model, CONTEXT)
    assert fused.modules == ("model.layers.1.self_attn",)
    assert "not to one MatMul" in fused.left["layer 0"]
    assert "layer 0" in unpaged


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("llama", ""),
        ("learned positions", ""),
        ("window", "not causal"),
        ("no positions", "takes no"),
    ],
)
def test_a_cache_is_paged_only_where_the_mask_is_what_paged_attention_hides(
    decoders: Decoders, kind: str, why: str
) -> None:
    model = decoders(kind.replace("no positions", "llama")).model
    if kind == "no positions":
        next(v for v in model.graph.inputs if v.name == "position_ids").name = "else"
    _, unpaged = attention.fuse(model, CONTEXT)
    assert why in unpaged
    assert bool(why) == bool(unpaged)
