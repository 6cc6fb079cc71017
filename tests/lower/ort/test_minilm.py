"""The demo's recipe on the real MiniLM's first blocks as TensorRT-RTX engines, fp16 and INT8, built
without a GPU.

Few calibration sentences, and short ones: which ranges they give changes neither the graph nor the
engine.
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
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import TensorRTTarget
from tests.minilm import BLOCKS, shortened

RECIPE = Path(__file__).parents[3] / "recipes" / "minilm-int8.yaml"


@pytest.fixture(scope="module")
def target() -> TensorRTTarget:
    (found,) = (t for t in recipe_file.read(RECIPE).targets if isinstance(t, TensorRTTarget))
    return found


@pytest.fixture(scope="module")
def steps(
    target: TensorRTTarget, minilm_source: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Folders of the stages, up to the engine."""
    pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    root = tmp_path_factory.mktemp("minilm")
    model = shortened(root / "model", minilm_source)
    few = ["calibrate.samples=8", "calibrate.sequence_length=16", f"model.source={model}"]
    recipe = recipe_file.read(RECIPE, few)
    folders = {n: root / n for n in ("load", "compress", "export", "lower", "build")}
    for folder in folders.values():
        folder.mkdir()
    LOAD.run(recipe.model, out=folders["load"])
    COMPRESS.run(recipe.compression, folders["load"], out=folders["compress"])
    EXPORT.run(target.export, folders["load"], folders["compress"], out=folders["export"])
    LOWER.run(target, folders["load"], folders["compress"], folders["export"], out=folders["lower"])
    BUILD.run(target, folders["lower"], out=folders["build"])
    return folders


@pytest.fixture(scope="module")
def made(steps: dict[str, Path]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((steps["build"] / "engine.json").read_text())
    return document


def test_every_linear_reaches_the_builder_with_coded_inputs_and_stays_coded(
    made: dict[str, Any],
) -> None:
    assert made["inspected"]["eligible"] == 6 * BLOCKS
    assert made["inspected"]["wider"] == []
    assert made["network"]["kept_packed"] is True
    kinds = {(m["weight"], m["activation"]) for m in made["network"]["modules"].values()}
    assert kinds == {("INT8", "INT8")}


def test_the_same_graph_in_fp16_is_larger_by_the_codes(
    steps: dict[str, Path], made: dict[str, Any], target: TensorRTTarget, tmp_path: Path
) -> None:
    wide = builder.build(
        steps["export"] / "model.onnx", tmp_path / "e", shapes=spans(target.shapes.model_dump())
    )
    weights = made["network"]["weights"]
    saved = weights["widened"] - weights["stored"]
    assert wide["bytes"] - made["network"]["bytes"] > 0.8 * saved
