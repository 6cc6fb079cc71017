"""Refusals of what a target cannot express, for models that are one ONNX file."""

from __future__ import annotations

from typing import Any

import pytest

from optimizer.checks import ordered
from optimizer.checks.context import Context
from optimizer.foundation.errors import OptimizeError
from optimizer.recipe.schema import Recipe


def recipe(target: dict[str, Any]) -> Recipe:
    rows = {"source": "npz", "columns": {"arrays": "*"}}
    return Recipe.model_validate(
        {
            "name": "file",
            "model": {"source": "/nowhere/model.onnx", "task": "tensors"},
            "calibrate": {"data": rows | {"files": ("/nowhere/c.npz",)}, "samples": 8},
            "quantize": {"method": "rtn", "weights": {"granularity": "channel"}},
            "targets": (target,),
            "validate": {"data": rows | {"files": ("/nowhere/e.npz",)}, "metric": "cosine"},
        }
    )


def refusals(target: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(OptimizeError) as raised:
        ordered.check(recipe(target), Context(fetch=False))
    return {e.where: e.problem for e in (raised.value, *raised.value.further)}


@pytest.mark.parametrize(
    "target",
    [
        {"runtime": "tensorrt-rtx", "shapes": {"batch": (1, 8, 32)}},
        {"runtime": "onnxruntime", "device": "cuda"},
    ],
)
def test_half_precision_of_an_onnx_file_is_refused_before_a_run(target: dict[str, Any]) -> None:
    assert "stays in float32" in refusals(target)["targets.0.float"]
    assert "targets.0.float" not in refusals(target | {"float": "fp32"})


def test_a_target_of_language_models_refuses_the_task_and_not_the_file() -> None:
    refused = refusals({"runtime": "gguf"})
    assert "its files hold language models" in refused["model.task"]
    assert "model.source" not in refused
