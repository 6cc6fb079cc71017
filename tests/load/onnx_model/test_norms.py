"""Norms of an ONNX file: smoothing folds factors into those that only linear layers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from optimizer import pipeline
from optimizer.foundation import state
from optimizer.load.onnx_model import stage
from optimizer.recipe.schema import Model, Recipe
from optimizer.store import Store
from tests.load.onnx_model import exported

WIDTH = 16


class PreNorm(nn.Module):
    """Two residual blocks whose norms are read by linear layers alone, with an outlier channel;
    the last norm is read by an addition, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for norm in (self.first, self.second):
                norm.weight[3] = 40.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first(x)
        x = x + self.left(normed) * self.right(normed).sigmoid()
        x = x + self.down(self.up(self.second(x)).relu())
        normed = self.last(x)
        return normed + self.head(normed)


@pytest.fixture(scope="module", params=[14, 17], ids=["several operators", "one operator"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, WIDTH)}
    path = tmp_path_factory.mktemp("norms") / "m.onnx"
    return exported.legacy(PreNorm(), inputs, path, request.param, batch=True)


def test_norms_that_only_linear_layers_read_are_listed_with_them(file: Path) -> None:
    opened = stage.open_file(Model(source=str(file), task="tensors"))
    assert dict(opened.finished.norms) == {"first": ("left", "right"), "second": ("up",)}


def rows(file: Path, count: int, seed: int) -> dict[str, Any]:
    np.savez(file, x=np.random.default_rng(seed).standard_normal((count, WIDTH), np.float32))
    return {"source": "npz", "files": (str(file),), "columns": {"arrays": "x"}}


@pytest.mark.parametrize("method", ["smoothquant", "awq"])
def test_factors_are_folded_into_the_norm_and_the_run_is_proven(
    file: Path, method: str, tmp_path: Path
) -> None:
    static = {"activations": {"range": "minmax"}} if method == "smoothquant" else {}
    recipe = Recipe.model_validate(
        {
            "name": "folded",
            "model": {"source": str(file), "task": "tensors"},
            "calibrate": {"data": rows(tmp_path / "c.npz", 64, 1), "samples": 64},
            "quantize": {"method": method, **static},
            "targets": ({"runtime": "onnxruntime", "threads": 1},),
            "validate": {
                "data": rows(tmp_path / "e.npz", 80, 2),
                "metric": "cosine",
                "max_drop": 0.05,
                "quantization_budget": 0.5,
                "latency": {"iterations": 5, "max_seconds": 0, "must_beat_float": False},
            },
        }
    )
    store = Store(tmp_path / "store")
    pipeline.run(recipe, store)
    steps = {step["stage"]: Path(step["path"]) for step in store.log}
    report = json.loads((steps["validate"] / "report.json").read_text())
    assert [e["hop"] for e in report["ledger"] if not e["ok"]] == []
    compressed = state.read(steps["compress"])
    assert {"graph.second.weight", "graph.second.bias"} <= set(compressed.replaced)
    graph = onnx.load(steps["lower"] / "model.onnx").graph
    assert not [n.name for n in graph.node if n.name.startswith("graph.up/factored")]
