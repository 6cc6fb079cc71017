"""A decoder with its cache and 4-bit weights as a TensorRT-RTX engine, built without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.export.stage import STAGE as EXPORT
from optimizer.load.stage import STAGE as LOAD
from optimizer.lower.build import STAGE as BUILD
from optimizer.lower.stage import STAGE as LOWER
from optimizer.recipe.schema import Compression, Model, Quantize, TensorRTTarget
from tests.decoders import write_tiny_decoder

W4 = {"bits": 4, "granularity": "group", "group_size": 32}
TARGET = TensorRTTarget.model_validate_json(
    json.dumps(
        {
            "runtime": "tensorrt-rtx",
            "float": "fp16",
            "shapes": {"batch": [1, 1, 2], "sequence": [1, 8, 32], "past": [0, 16, 64]},
        }
    )
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build stage's folder of a tiny llama."""
    root = tmp_path_factory.mktemp("engine")
    model = write_tiny_decoder(root / "model", "llama")
    folders = {n: root / n for n in ("load", "compress", "export", "lower", "build")}
    for folder in folders.values():
        folder.mkdir()
    LOAD.run(Model(source=str(model), task="text-generation"), out=folders["load"])
    quantize = Quantize.model_validate_json(json.dumps({"weights": W4, "head": W4}))
    section = Compression(calibrate=None, quantize=quantize, task="text-generation")
    COMPRESS.run(section, folders["load"], out=folders["compress"])
    EXPORT.run(TARGET.export, folders["load"], folders["compress"], out=folders["export"])
    LOWER.run(TARGET, folders["load"], folders["compress"], folders["export"], out=folders["lower"])
    BUILD.run(TARGET, folders["lower"], out=folders["build"])
    return folders["build"]


def test_the_engine_takes_the_cache_at_every_length_of_the_profile(built: Path) -> None:
    network = json.loads((built / "engine.json").read_text())["network"]
    text = json.dumps(network["profiles"])
    assert "past_key_values.0.key" in text
    assert "past_key_values.1.value" in text


def test_every_linear_reaches_the_builder_as_codes(built: Path) -> None:
    document = json.loads((built / "engine.json").read_text())
    assert document["inspected"]["eligible"] == 15  # seven in each block, and the head
    assert document["inspected"]["wider"] == []
    assert (built / "model.engine").stat().st_size > 0
