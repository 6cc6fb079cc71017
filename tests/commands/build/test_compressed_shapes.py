"""Predicted integers: which weights, and how many bytes."""

from __future__ import annotations

from typing import Any

from optimizer.compress.predicted import HEAD, predict_shapes
from optimizer.recipe.schema import Compression, Quantize
from optimizer.store import CompressedShapes, lowered_bytes

BLOCKS = {f"model.layers.{i}.mlp.up_proj.weight": (64, 32) for i in range(2)}
MODEL = {"model.embed_tokens.weight": (300, 32), "model.norm.weight": (32,), **BLOCKS}
GROUPS: dict[str, Any] = {"granularity": "group", "group_size": 16}


def predicted(**quantize: Any) -> CompressedShapes:
    section = Compression(
        calibrate=None,
        task="text-generation",
        quantize=Quantize.model_validate({"weights": {"bits": 4, **GROUPS}, **quantize}),
    )
    found = predict_shapes(section, MODEL)
    assert isinstance(found, CompressedShapes)
    return found


def test_matrices_in_blocks_are_integers_and_others_stay_float() -> None:
    found = predicted()
    assert dict(found) == MODEL
    assert set(found.integers) == set(BLOCKS)
    assert lowered_bytes(found, 4) == 4 * (300 * 32 + 32) + 2 * (64 * 32 * 3 // 4)


def test_a_tied_head_is_stored_beside_the_embedding() -> None:
    weights = {"bits": 8, **GROUPS}
    found = predicted(head=weights, embedding=weights)
    assert found.integers[HEAD] == found.integers["model.embed_tokens.weight"]
    assert found.integers[HEAD] == ((300, 32), 1.25)


def test_a_module_that_stays_float_is_not_counted_as_integers() -> None:
    assert set(predicted(keep_float=("*.0.mlp.*",)).integers) == {list(BLOCKS)[1]}
