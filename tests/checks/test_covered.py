"""A model of an architecture that is not covered is refused before anything of it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.checks import covered
from optimizer.checks.context import Context
from optimizer.foundation.errors import CheckpointError
from optimizer.recipe.schema import Recipe

OF_TIMM = {
    "num_classes": 2,
    "pretrained_cfg": {
        "input_size": [3, 224, 224],
        "interpolation": "bicubic",
        "crop_pct": 0.9,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
    },
}


def check(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    data = {"source": "json", "files": ("rows.jsonl",)}
    covered.check(
        Recipe.model_validate(
            {
                "name": "images",
                "model": {"source": str(folder), "task": "image-classification"},
                "calibrate": {"data": {**data, "columns": {"image": "image"}}},
                "quantize": {"method": "rtn", "weights": {"bits": 8, "granularity": "channel"}},
                "targets": ({"runtime": "onnxruntime", "device": "cpu"},),
                "validate": {
                    "data": {**data, "columns": {"image": "image", "label": "label"}},
                    "metric": "accuracy",
                },
            }
        ),
        Context(),
    )


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "siglip2"}, "'siglip2' is not covered.*patches"),
        ({**OF_TIMM, "architecture": "nfnet_l0"}, "'nfnet_l0' is not covered.*vit_"),
    ],
)
def test_an_uncovered_architecture_is_refused_by_its_config(
    tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    with pytest.raises(CheckpointError, match=why):
        check(tmp_path, config)


@pytest.mark.parametrize(
    "config", [{"model_type": "vit"}, {**OF_TIMM, "architecture": "vit_tiny_patch16_224"}]
)
def test_a_covered_one_is_not(tmp_path: Path, config: dict[str, Any]) -> None:
    check(tmp_path, config)
