from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from optimizer.lower.ort import attention
from tests.lower.decoder_graphs import CONTEXT, Decoder, answers, text
from tests.lower.running import difference

Decoders = Callable[[str], Decoder]
ROUNDING = 3e-6  # relative L2: float32 sums in another order


@pytest.fixture
def llama(decoders: Decoders) -> Decoder:
    return decoders("llama")


def fused(made: Decoder) -> ir.Model:
    model = made.model
    assert not attention.fuse(model, CONTEXT).left
    return model


def operators(model: ir.Model) -> list[str]:
    return [n.op_type for n in model.graph]


@pytest.mark.parametrize(
    ("length", "pads", "pieces"),
    [
        (17, (0,), (17,)),
        (9, (0,), (5, 1, 1, 1, 1)),
        (17, (0,), (7, 6, 4)),
        (12, (0, 4, 9), (10, 1, 1)),
        (8, (0, 0), (8,)),
    ],
    ids=["one piece", "token by token", "pieces", "padded on the left", "batch"],
)
def test_fused_equals_unfused(
    llama: Decoder, length: int, pads: tuple[int, ...], pieces: tuple[int, ...]
) -> None:
    given = text(length, pads)
    wanted = answers(llama.model, given, pieces)
    assert difference(answers(fused(llama), given, pieces), wanted) < ROUNDING


def test_padding_changes_nothing(llama: Decoder) -> None:
    model, given = fused(llama), text(12, (5, 0))
    alone = answers(model, type(given)(given.ids[:1, 5:], given.mask[:1, 5:]), (5, 1, 1))
    assert difference(answers(model, given, (10, 1, 1))[:7], alone) < ROUNDING


def test_past_and_present_may_be_one_buffer(llama: Decoder) -> None:
    model, given, pieces = fused(llama), text(12), (8, 1, 1, 1, 1)
    assert model.metadata_props["kv_cache"] == "shared"
    shared = answers(model, given, pieces, room=20)
    assert np.array_equal(shared, answers(model, given, pieces))


def test_every_attention_is_one_operator(llama: Decoder) -> None:
    found = operators(fused(llama))
    assert found.count("GroupQueryAttention") == 2
    assert not {"Softmax", "Cos", "Expand_1"} & set(found)
    assert found.count("MatMul") == 2 * 7 + 1


@pytest.mark.parametrize("kind", ["heads normed", "learned positions"])
def test_other_forms_of_heads_and_positions(decoders: Decoders, kind: str) -> None:
    made = decoders(kind)
    given, pieces = text(12, (0, 4)), (9, 1, 1, 1)
    wanted = answers(made.model, given, pieces)
    assert difference(answers(fused(made), given, pieces), wanted) < ROUNDING


def test_a_sliding_window_is_left_and_told(decoders: Decoders) -> None:
    made = decoders("window")
    model = made.model
    told = attention.fuse(model, CONTEXT)
    assert not told.modules
    assert "not causal" in told.left["layer 0"]
    assert operators(model) == operators(made.model)
    assert "kv_cache" not in model.metadata_props


def test_a_window_wider_than_the_context_is_none(decoders: Decoders) -> None:
    model = decoders("window").model
    assert attention.fuse(model, 60).modules


def changed(model: ir.Model, name: str, value: np.ndarray) -> ir.Model:
    """The model with another value in one initializer."""
    model.graph.initializers[name].const_value = ir.tensor(value, name=name)
    return model


def test_angles_that_grow_unequally_are_left(llama: Decoder) -> None:
    model = llama.model
    cast = next(n for n in model.graph if n.op_type == "Cos").inputs[0]
    assert cast is not None
    squared = ir.node("Mul", [cast, cast], name="squared")
    ir.convenience.replace_all_uses_with(cast, squared.outputs[0])
    squared.replace_input_with(0, cast)
    squared.replace_input_with(1, cast)
    model.graph.insert_after(cast.producer(), squared)  # type: ignore[arg-type]
    told = attention.fuse(model, CONTEXT)
    assert "equal steps" in told.left["layer 0"]


def test_queries_turned_by_other_angles_than_keys_are_left(llama: Decoder) -> None:
    model = llama.model
    mul = [n for n in model.graph if n.op_type == "Mul" and "layers.1.self_attn" in str(n.name)]
    cosine = mul[0].inputs[1]
    assert cosine is not None
    twice = ir.node("Add", [cosine, cosine], name="twice")
    model.graph.insert_before(mul[0], twice)
    mul[0].replace_input_with(1, twice.outputs[0])
    told = attention.fuse(model, CONTEXT)
    assert told.modules == ("model.layers.0.self_attn",)
    assert "differently" in told.left["layer 1"]
    assert "kv_cache" not in model.metadata_props
