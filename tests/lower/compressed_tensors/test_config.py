"""A model that readers of compressed-tensors could not open is refused from its config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.checks import target_models
from optimizer.checks.context import Context
from optimizer.foundation.errors import RecipeError
from optimizer.recipe.schema import Recipe

RECIPE = {
    "name": "images",
    "quantize": {"method": "rtn"},
    "targets": ({"runtime": "onnxruntime"}, {"runtime": "compressed-tensors"}),
    "validate": {
        "data": {"source": "json", "files": ("rows.jsonl",), "columns": {"image": "image"}},
        "metric": "cosine",
    },
}


def recipe(folder: Path, kind: str) -> Recipe:
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    model = {"source": str(folder), "task": "image-classification"}
    return Recipe.model_validate({**RECIPE, "model": model})


def test_a_model_of_linear_layers_is_accepted(tmp_path: Path) -> None:
    target_models.check(recipe(tmp_path, "vit"), Context())


@pytest.mark.parametrize("kind", ["resnet", "regnet"])
def test_folded_norms_are_refused_before_any_work(kind: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"'{kind}'.*targets\.1.*Remove the target"):
        target_models.check(recipe(tmp_path, kind), Context())
