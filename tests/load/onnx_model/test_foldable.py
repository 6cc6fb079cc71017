"""Factors of channels in an ONNX file: smoothing folds them into norms, equalization into
convolutions."""

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
from optimizer.compress.apply.activations import equalization
from optimizer.compress.selection import select
from optimizer.compress.walk.model_source import ModelSource
from optimizer.foundation import state
from optimizer.foundation.errors import RecipeError
from optimizer.load.onnx_model import stage
from optimizer.load.stage import open_skeleton
from optimizer.recipe.compression.quantize import Quantize
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


class Chain(nn.Module):
    """Convolutions with ReLU between them, one by depth, with channels of very different range;
    the last one ends in a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
        self.narrow, self.wide = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 6, 1)
        scale = torch.logspace(-1.5, 1.5, 8)
        with torch.no_grad():
            self.first.weight.mul_(scale[:, None, None, None])
            self.first.bias.mul_(scale)  # type: ignore[union-attr]
            self.deep.weight.div_(scale[:, None, None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow(self.deep(self.first(x).relu()).relu())
        return x.sigmoid() + self.wide(x.relu())


def run(methods: tuple[str, ...], file: Path, data: list[Any], store: Store) -> dict[str, Any]:
    """{hop: its entry in the report} of a run on an ONNX file."""
    recipe = Recipe.model_validate(
        {
            "name": "equalized",
            "model": {"source": str(file), "task": "tensors"},
            "calibrate": {"data": data[0], "samples": 64},
            "quantize": {"methods": methods, "activations": {"range": "minmax"}},
            "targets": ({"runtime": "onnxruntime", "threads": 1},),
            "validate": {
                "data": data[1],
                "metric": "cosine",
                "max_drop": 0.2,
                "quantization_budget": 0.9,
                "latency": {"iterations": 5, "max_seconds": 0, "must_beat_float": False},
            },
        }
    )
    pipeline.run(recipe, store)
    steps = {step["stage"]: Path(step["path"]) for step in store.log}
    report = json.loads((steps["validate"] / "report.json").read_text())
    return {entry["hop"]: entry for entry in report["ledger"]}


def test_equalization_is_proven_and_a_wrong_factor_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 3, 8, 8)}
    file = exported.legacy(Chain(), inputs, tmp_path / "m.onnx", 17, batch=True)
    opened = stage.open_file(Model(source=str(file), task="tensors"))
    assert dict(opened.finished.equalized) == {"first": ("deep",), "deep": ("narrow",)}
    data = []
    for name, count in (("c.npz", 64), ("e.npz", 80)):
        rng = np.random.default_rng(count)
        np.savez(tmp_path / name, x=rng.standard_normal((count, 3, 8, 8), np.float32))
        files = (str(tmp_path / name),)
        data.append({"source": "npz", "files": files, "columns": {"arrays": "x"}})
    store = Store(tmp_path / "store")
    plain = run(("rtn",), file, data, store)
    equal = run(("equalization", "rtn"), file, data, store)
    assert [hop for hop, entry in equal.items() if not entry["ok"]] == []
    error = equal["compress"]["measured"]["relative_l2"]
    assert error < plain["compress"]["measured"]["relative_l2"] / 2
    right = equalization.multiply_inputs
    monkeypatch.setattr(
        equalization, "multiply_inputs", lambda w, s, groups: right(w, s.flip(0), groups)
    )
    wrong = run(("equalization", "rtn"), file, data, Store(tmp_path / "another"))
    assert not wrong["fold"]["ok"]


def test_equalization_of_a_model_without_such_layers_is_refused_before_a_run(
    tiny_bert: Path, tmp_path: Path
) -> None:
    config, model, family = open_skeleton(
        Model(source=str(tiny_bert), task="feature-extraction"), tiny_bert
    )
    source = ModelSource(model, {}, family, family.prefix("feature-extraction"))
    with pytest.raises(RecipeError, match=f"a model of type {config.model_type} has no two layers"):
        select(source, Quantize(method="equalization", activations={"range": "minmax"}))
