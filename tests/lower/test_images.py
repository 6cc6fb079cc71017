"""The recipes of images as TensorRT-RTX engines, fp16 and INT8, built without a GPU.

On small models of the same architectures, with the recipe's own way of quantizing and its target:
the real ones are made by scripts in minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.export.stage import STAGE as EXPORT
from optimizer.foundation import state
from optimizer.load.stage import STAGE as LOAD
from optimizer.lower.build import STAGE as BUILD
from optimizer.lower.stage import STAGE as LOWER
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import TensorRTTarget
from tests.vision import recipe

RECIPES = Path(__file__).parents[2] / "recipes"
KINDS = {
    "vit-fashion-int8": "vit",
    "resnet-fashion-int8": "resnet",
    "efficientnet-lite0-int8": "efficientnet_lite",
}


@pytest.mark.parametrize("name", KINDS)
def test_an_engine_is_built_of_each_recipe_of_images_with_every_module_coded(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    file = RECIPES / f"{name}.yaml"
    quantize: dict[str, Any] = yaml.safe_load(file.read_text())["quantize"]
    (target,) = (t for t in recipe_file.read(file).targets if isinstance(t, TensorRTTarget))
    assert target.float_type == "fp16"
    small = recipe(tmp_path, KINDS[name], quantize)
    folders = {n: tmp_path / n for n in ("load", "compress", "export", "lower", "build")}
    for folder in folders.values():
        folder.mkdir()
    load, compress, export, lower, build = folders.values()
    LOAD.run(small.model, out=load)
    COMPRESS.run(small.compression, load, out=compress)
    EXPORT.run(target.export, load, compress, out=export)
    LOWER.run(target, load, compress, export, out=lower)
    BUILD.run(target, lower, out=build)
    inspected = json.loads((build / "engine.json").read_text())["inspected"]
    assert inspected["eligible"] == len(state.read(compress).weights) > 0
    assert inspected["wider"] == []
