"""Parts of a graph: cut where one tensor carries everything, and together the whole graph."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

from optimizer.compress import stage as compress
from optimizer.compress.walk.model_source import ModelSource, open_source
from optimizer.foundation import state
from optimizer.load.onnx_model import stage as load
from optimizer.model.graph import record
from optimizer.recipe.schema import Compression, Model, Recipe
from tests.load.onnx_model import exported


class Layer(nn.Module):
    """An attention with a mask, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).split(32, -1)
        x = x + self.out((q @ k.transpose(1, 2) + hidden).softmax(-1) @ v)
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x, hidden = self.embed(ids), (1 - mask.float())[:, None] * -1e4
        for layer in self.layers:
            x = layer(x, hidden)
        return self.head(x[:, 0])  # type: ignore[no-any-return]


INPUTS = {"ids": torch.randint(50, (4, 6)), "mask": torch.ones(4, 6, dtype=torch.int64)}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    torch.manual_seed(0)
    file = exported.legacy(Layers(), INPUTS, folder / "m.onnx", 17)
    load.run(Model(source=str(file), task="tensors"), folder)
    return folder


def run_parts(source: ModelSource, inputs: dict[str, Tensor]) -> Tensor:
    model: Any = source.model
    (carried, *others), *later = model.arguments(inputs)
    for block, read in zip(source.blocks, (others, *later), strict=True):
        (carried,) = model.get_submodule(block)(carried, *read)
    return carried


def test_attention_and_feed_forward_are_parts_that_give_the_graph_s_answer(loaded: Path) -> None:
    source = open_source("tensors", loaded)
    modules = [
        [p.rpartition(".")[2] for p in source.paths(block) if p.endswith(("qkv", "up", "head"))]
        for block in source.blocks
    ]
    assert modules == [["qkv"], ["up"], ["qkv"], ["up"], ["head"]]
    inputs = {**INPUTS, "mask": torch.tensor([[1, 1, 1, 1, 0, 0]]).expand(4, 6)}
    with source.filled(), torch.no_grad():
        assert torch.equal(run_parts(source, inputs), source.model(**inputs)["y"])


def test_one_part_is_in_memory_at_a_time(loaded: Path) -> None:
    source = open_source("tensors", loaded)
    source.fill(source.blocks[1])
    filled = {name for name, p in source.model.named_parameters() if not p.is_meta}
    assert {n.rpartition(".")[0].rpartition(".")[2] for n in filled} == {"up", "down", "up_norm"}
    source.empty(source.blocks[1])
    assert all(p.is_meta for p in source.model.parameters())


def section(loaded: Path, rows: dict[str, Any], **quantize: Any) -> Compression:
    np.savez(loaded / "rows.npz", **rows)
    data = {"source": "npz", "files": (str(loaded / "rows.npz"),), "columns": {"arrays": "*"}}
    recipe = {
        "name": "graph",
        "model": {"source": str(loaded / "m.onnx"), "task": "tensors"},
        "calibrate": {"data": data, "samples": 40},
        "quantize": quantize,
        "targets": ({"runtime": "onnxruntime"},),
        "validate": {"data": data, "metric": "cosine"},
    }
    return Recipe.model_validate(recipe).compression


@pytest.mark.parametrize("method", ["rtn", "gptq", "autoround"])
def test_weights_rounded_in_order_are_those_of_one_part_and_learned_ones_are_not(
    method: str, loaded: Path, tmp_path: Path
) -> None:
    options = {"autoround": {"steps": 4}} if method == "autoround" else {}
    rng = np.random.default_rng(1)
    rows = {"ids": rng.integers(0, 50, (40, 6)), "mask": np.ones((40, 6), np.int64)}
    chosen = section(loaded, rows, method=method, weights={"bits": 4}, **options)
    whole = tmp_path / "whole"
    shutil.copytree(loaded, whole)
    one = record.read(whole / "checkpoint", {})
    record.write(record.Graph(**{**vars(one), "starts": ()}), whole / "checkpoint")
    states = []
    for folder in (loaded, whole):
        out = tmp_path / f"{folder.name}-state"
        out.mkdir()
        compress.run(chosen, folder, out)
        states.append(state.read(out).weights)
    equal = {n: torch.equal(q.integers, states[1][n].integers) for n, q in states[0].items()}
    assert len(equal) == 9
    assert all(equal.values()) == (method != "autoround")


def test_a_weight_that_is_read_twice_and_a_tensor_that_skips_ahead_keep_parts_together(
    tmp_path: Path,
) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["1"]),
        helper.make_node("MatMul", ["1", "b"], ["2"]),
        helper.make_node("MatMul", ["2", "b"], ["3"]),
        helper.make_node("MatMul", ["3", "c"], ["4"]),
        helper.make_node("MatMul", ["4", "d"], ["5"]),
        helper.make_node("Add", ["4", "5"], ["y"]),
    ]
    arrays = {n: exported.weights(8, 8, seed=i) for i, n in enumerate("abcd")}
    file = exported.by_hand(tmp_path / "m.onnx", nodes, arrays)
    load.run(Model(source=str(file), task="tensors"), tmp_path)
    source = open_source("tensors", tmp_path)
    parts = [[p[-1] for p in source.paths(block)] for block in source.blocks]
    assert parts == [["a"], ["b"], ["c"], ["d"]]


def test_heads_that_read_one_tensor_are_parts_that_pass_it_on(tmp_path: Path) -> None:
    """The second head reads it behind a tensor of the other input, which no part makes."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("MatMul", ["r", "a"], ["z"]),
        helper.make_node("MatMul", ["m", "b"], ["w"]),
        helper.make_node("Concat", ["m", "r"], ["wide"], axis=1),
        helper.make_node("MatMul", ["wide", "c"], ["y"]),
    ]
    arrays = {"a": exported.weights(8, 8), "b": exported.weights(64, 8)}
    arrays["c"] = exported.weights(72, 8)
    file = exported.by_hand(tmp_path / "m.onnx", nodes, arrays)
    model = onnx.load(file)
    for values, name, width in (
        (model.graph.input, "m", 64),
        (model.graph.output, "z", 8),
        (model.graph.output, "w", 8),
    ):
        values.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", width]))
    onnx.save(model, file)
    load.run(Model(source=str(file), task="tensors"), tmp_path)
    source = open_source("tensors", tmp_path)
    assert len(source.blocks) == 3
    inputs = {"x": torch.randn(3, 8), "m": torch.randn(3, 64)}
    with source.filled(), torch.no_grad():
        assert torch.equal(run_parts(source, inputs), source.model(**inputs)["y"])


def test_autoround_learns_what_a_gradient_reaches_and_leaves_the_rest_at_the_nearest(
    tmp_path: Path,
) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.gates = nn.Linear(32, 16), nn.GRU(16, 16, batch_first=True)
            self.head = nn.Linear(16, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gates(self.before(x))[0])  # type: ignore[no-any-return]

    exported.legacy(Recurrent(), {"x": torch.randn(2, 5, 32)}, tmp_path / "m.onnx", 17)
    load.run(Model(source=str(tmp_path / "m.onnx"), task="tensors"), tmp_path)
    rows = {"x": np.random.default_rng(1).standard_normal((40, 5, 32)).astype(np.float32)}
    options = {"weights": {"bits": 4}, "autoround": {"steps": 4}}
    chosen = section(tmp_path, rows, method="autoround", **options)
    compress.run(chosen, tmp_path, tmp_path)
    notes = {
        row["module"]: row["note"] for row in json.loads((tmp_path / "modules.json").read_text())
    }
    assert {name: "learned" in note for name, note in notes.items()} == {
        "graph.before": False,
        "graph.head": True,
    }
