"""The estimate of an ONNX file follows its parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from optimizer.compress import graph_estimate, predicted
from optimizer.compress.graph_estimate import estimate
from optimizer.foundation import state
from optimizer.foundation.process.machine_speed import MachineSpeed
from optimizer.foundation.state import weight_name
from optimizer.load.onnx_model import stage as load
from optimizer.model.graph.needs import GraphShapes
from optimizer.recipe.schema import Calibrate, Compression, DataSpec, Model, Quantize
from optimizer.store import CompressedShapes, Estimate
from tests.load.onnx_model import exported

SPEED = MachineSpeed(1e9, 1e9, 1e9, 1e9, 1e9, 1e9, threads=2)
ROWS = DataSpec(source="npz", files=("rows.npz",), columns={"arrays": "*"})
Of = Callable[[int, int], GraphShapes]


def section(samples: int = 10_000, **quantize: Any) -> Compression:
    return Compression(
        calibrate=Calibrate(data=ROWS, samples=samples),
        quantize=Quantize.model_validate({"activations": {"range": "minmax"}, **quantize}),
        task="tensors",
    )


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Of:
    """shapes(layers, positions) -> those of layers of 32 features, of which each is a part."""

    @cache
    def call(layers: int, positions: int) -> GraphShapes:
        file = tmp_path_factory.mktemp("layers") / "m.onnx"
        each = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(8)]
        net = nn.Sequential(
            *(layer for pair in each[:layers] for layer in (pair, nn.LayerNorm(32)))
        )
        exported.legacy(net, {"x": torch.randn(2, positions, 32)}, file, 17)
        found = load.shapes(Model(source=str(file), task="tensors"))
        assert isinstance(found, GraphShapes)
        assert found.libraries > 0
        found.libraries = 0  # it grows from call to call in one process
        return found

    return call


def predict(shapes: GraphShapes, **more: Any) -> Estimate:
    return estimate(section(**more), shapes, SPEED)


def test_depth_costs_disk_and_time_but_no_memory_beside_the_rows(shapes: Of) -> None:
    shallow, deep = shapes(3, 4), shapes(8, 4)
    assert len(deep.parts) > len(shallow.parts) > 1
    many, more = (predict(each, samples=10**6) for each in (shallow, deep))
    assert more.memory == many.memory
    assert more.disk > many.disk
    assert more.seconds > many.seconds


def test_larger_rows_and_more_of_them_cost_memory(shapes: Of) -> None:
    small, large = shapes(3, 4), shapes(3, 8)
    assert predict(large).memory > predict(small).memory
    assert predict(small, samples=20_000).memory > predict(small).memory


def test_second_moments_cost_memory_and_time(shapes: Of) -> None:
    nearest, moments = predict(shapes(3, 4)), predict(shapes(3, 4), method="gptq")
    assert moments.memory > nearest.memory
    assert moments.seconds > nearest.seconds


def test_the_parts_and_the_integers_predicted_are_those_of_the_run(tmp_path: Path) -> None:
    from optimizer.compress import stage as compress
    from tests.model.graph import test_parts

    torch.manual_seed(0)
    file = exported.legacy(test_parts.Layers(), test_parts.INPUTS, tmp_path / "m.onnx", 17)
    model = Model(source=str(file), task="tensors")
    load.run(model, tmp_path)
    found = load.shapes(model)
    assert isinstance(found, GraphShapes)
    graph = json.loads((tmp_path / "checkpoint" / "graph" / "graph.json").read_text())
    assert len(found.parts) == 1 + len(graph["starts"])
    kept = {"method": "rtn", "keep_float": ("*.1.*",)}
    rows = {name: np.resize(t.numpy(), (40, 6)) for name, t in test_parts.INPUTS.items()}
    asked = test_parts.section(tmp_path, rows, **kept)
    (tmp_path / "out").mkdir()
    compress.run(asked, tmp_path, tmp_path / "out")
    compressed = predicted.predict_shapes(asked, found)
    assert isinstance(compressed, CompressedShapes)
    modules = state.read(tmp_path / "out").modules
    assert set(compressed.integers) == {weight_name(name) for name in modules}
    written = sum(f.stat().st_size for f in (tmp_path / "out").iterdir())
    assert written < graph_estimate.estimate(asked, found, SPEED).disk + 20_000
