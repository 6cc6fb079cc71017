"""SmolLM2's first blocks with their cache as TensorRT-RTX engines, fp16 and INT4, without a GPU.

Weights are rounded to nearest: their integers change neither the graph nor the engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.export.stage import STAGE as EXPORT
from optimizer.harness.bundle.engines import spans
from optimizer.harness.runtimes.trt.build import builder
from optimizer.load.stage import STAGE as LOAD
from optimizer.lower.build import STAGE as BUILD
from optimizer.lower.stage import STAGE as LOWER
from optimizer.recipe.schema import Compression, Quantize, TensorRTTarget
from tests.smollm2 import BLOCKS, MODEL, TOKENS, shortened

W4 = {"bits": 4, "granularity": "group", "group_size": 64}
SHAPES = {"batch": [1, 1, 1], "sequence": [1, 128, 512], "past": [0, 256, 512]}
WIDTH = 576
TARGET = TensorRTTarget.model_validate_json(
    json.dumps({"runtime": "tensorrt-rtx", "float": "fp16", "shapes": SHAPES})
)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the stages, up to the engine."""
    pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    root = tmp_path_factory.mktemp("smollm2")
    folders = {n: root / n for n in ("load", "compress", "export", "lower", "build")}
    for folder in folders.values():
        folder.mkdir()
    source = shortened(tmp_path_factory.mktemp("shortened"))
    LOAD.run(MODEL.model_copy(update={"source": str(source)}), out=folders["load"])
    quantize = Quantize.model_validate_json(json.dumps({"weights": W4, "head": W4}))
    section = Compression(calibrate=None, quantize=quantize, task="text-generation")
    COMPRESS.run(section, folders["load"], out=folders["compress"])
    EXPORT.run(TARGET.export, folders["load"], folders["compress"], out=folders["export"])
    LOWER.run(TARGET, folders["load"], folders["compress"], folders["export"], out=folders["lower"])
    BUILD.run(TARGET, folders["lower"], out=folders["build"])
    return folders


@pytest.fixture(scope="module")
def made(steps: dict[str, Path]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((steps["build"] / "engine.json").read_text())
    return document


def test_every_linear_and_the_head_stay_four_bits_in_the_engine(made: dict[str, Any]) -> None:
    assert made["inspected"]["eligible"] == BLOCKS * 7 + 1
    assert made["inspected"]["wider"] == []
    assert made["network"]["kept_packed"] is True


def test_the_cache_of_every_layer_is_in_the_profile(made: dict[str, Any]) -> None:
    (profile,) = made["network"]["profiles"]
    assert profile[f"past_key_values.{BLOCKS - 1}.value"] == {
        "min": [1, 3, 0, 64],
        "opt": [1, 3, 256, 64],
        "max": [1, 3, 512, 64],
    }


def test_the_same_graph_in_fp16_is_larger_by_the_codes(
    steps: dict[str, Path], made: dict[str, Any], tmp_path: Path
) -> None:
    profile = spans(TARGET.shapes.model_dump())
    wide = builder.build(steps["export"] / "model.onnx", tmp_path / "e", shapes=profile)
    weights = made["network"]["weights"]
    tied = TOKENS * WIDTH * 2  # in fp16 the head is the embedding
    saved = weights["widened"] - weights["stored"] - tied
    assert wide["bytes"] - made["network"]["bytes"] > 0.9 * saved
