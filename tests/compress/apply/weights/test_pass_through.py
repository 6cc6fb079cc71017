"""The integers of a quantized checkpoint are copied unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.compress import stage
from optimizer.foundation import state as states
from optimizer.foundation.errors import RecipeError
from optimizer.load.stage import STAGE as LOAD
from optimizer.lower.stage import run as lower
from optimizer.recipe.compression import composition
from optimizer.recipe.schema import CompressedTensorsTarget, Compression, Model, Quantize
from tests.compress.checkpoints import contents

TASK = "text-generation"
W4 = {"weights": {"bits": 4, "granularity": "group", "group_size": 32}}


def load(model: Path, out: Path) -> Path:
    out.mkdir()
    LOAD.run(Model(source=str(model), task=TASK), out=out)
    return out


def compress(source: Path, out: Path, quantize: dict[str, object]) -> Path:
    out.mkdir()
    section = Compression(
        calibrate=None, quantize=Quantize.model_validate_json(json.dumps(quantize)), task=TASK
    )
    stage.run(section, source, out=out)
    return out


def test_codes_survive_the_way_out_and_back_in(tiny_llama: Path, tmp_path: Path) -> None:
    source = load(tiny_llama, tmp_path / "load")
    made = compress(source, tmp_path / "made", W4)
    folder = tmp_path / "folder"
    folder.mkdir()
    target = CompressedTensorsTarget(runtime="compressed-tensors", float="fp32")
    lower(target, source, made, source, out=folder)
    again = load(folder / "model", tmp_path / "again")
    kept = compress(again, tmp_path / "kept", {"method": "pass_through"})
    assert contents(kept)["tensors.safetensors"] == contents(made)["tensors.safetensors"]
    assert len(states.read(kept).weights) == 14


def test_a_float_checkpoint_has_no_codes_to_keep(tiny_llama: Path, tmp_path: Path) -> None:
    source = load(tiny_llama, tmp_path / "load")
    with pytest.raises(RecipeError, match="not quantized"):
        compress(source, tmp_path / "kept", {"method": "pass_through"})


def test_pass_through_leaves_nothing_else_to_ask_for() -> None:
    quantize = Quantize.model_validate_json(json.dumps({"method": "pass_through", **W4}))
    with pytest.raises(ValueError, match="nothing else"):
        composition.check(quantize)
