"""A planted fault of an operator is caught at load; branches of different size are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import helper

from optimizer.compress.selection import match_modules
from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.load.onnx_model import reference, stage
from optimizer.model.graph.module import GraphModel
from optimizer.recipe.schema import Model
from tests.load.onnx_model import exported

NODES = [
    helper.make_node("MatMul", ["x", "W"], ["h"]),
    helper.make_node("LeakyRelu", ["h"], ["a"], alpha=0.2, name="bend"),
    helper.make_node("MatMul", ["a", "V"], ["y"]),
]


def test_an_operator_with_another_slope_is_caught_and_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"W": exported.weights(8, 16), "V": exported.weights(16, 4)}
    file = exported.by_hand(tmp_path / "m.onnx", NODES, weights)
    opened = stage.open_file(Model(source=str(file), task="tensors"))
    graph = replace(stage.graph_of(opened), folder=tmp_path)
    tensors = {n: torch.from_numpy(a) for n, a in opened.finished.parameters.items()}
    expected = reference.answers(file, opened.ports, ["y"], opened.model)
    reference.compare(graph, tensors, opened.ports, expected, file)
    nodes = [
        replace(node, attributes={"alpha": 0.2001}) if node.name == "bend" else node
        for node in graph.nodes
    ]
    broken = replace(graph, nodes=tuple(nodes))
    with pytest.raises(CheckpointError, match="'y': a row is"):
        reference.compare(broken, tensors, opened.ports, expected, file)
    mended = reference.without_misread(broken, opened.draft, tensors, opened.ports)
    assert [node.name for node in mended.nodes if node.file] == ["bend"]
    reference.compare(mended, tensors, opened.ports, expected, file)
    assert "node 'bend' (LeakyRelu) stays float" in capsys.readouterr().err
    assert reference.without_misread(graph, opened.draft, tensors, opened.ports) is graph


def test_an_answer_that_rounding_seldom_moves_has_a_limit_of_a_few_roundoffs(
    tmp_path: Path,
) -> None:
    nodes = [*NODES[:1], helper.make_node("Mul", ["h", "sharp"], ["a"])]
    nodes.append(helper.make_node("Softmax", ["a"], ["y"], name="certain"))
    weights = {"W": exported.weights(8, 4), "sharp": np.float32(1000)}
    file = exported.by_hand(tmp_path / "m.onnx", nodes, weights)
    opened = stage.open_file(Model(source=str(file), task="tensors"))
    graph = replace(stage.graph_of(opened), folder=tmp_path)
    tensors = {n: torch.from_numpy(a) for n, a in opened.finished.parameters.items()}
    expected = reference.answers(file, opened.ports, ["y"], opened.model)
    reference.compare(graph, tensors, opened.ports, expected, file)
    wrong = [one | {"y": one["y"] * np.float32(1.00001)} for one in expected[0]]
    with pytest.raises(CheckpointError, match="'y': a row is 1"):
        reference.compare(graph, tensors, opened.ports, (wrong, expected[1]), file)


@pytest.mark.parametrize(("factor", "warned"), [(1.0, False), (640.0, True)])
def test_a_module_that_reads_boxes_and_scores_in_one_tensor_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float, warned: bool
) -> None:
    file = exported.by_hand(
        tmp_path / "m.onnx",
        [
            helper.make_node("MatMul", ["x", "W"], ["h"]),
            helper.make_node("Mul", ["h", "factor"], ["boxes"]),
            helper.make_node("Sigmoid", ["h"], ["scores"]),
            helper.make_node("Concat", ["boxes", "scores"], ["both"], axis=1, name="join"),
            helper.make_node("MatMul", ["both", "head.weight"], ["y"]),
        ],
        {
            "W": exported.weights(8, 4),
            "factor": np.float32(factor),
            "head.weight": exported.weights(8, 3),
        },
    )
    (tmp_path / "out").mkdir()
    stage.run(Model(source=str(file), task="tensors"), tmp_path / "out")
    assert ("warning: graph.head reads 'join'" in capsys.readouterr().err) == warned


def test_a_module_is_named_as_in_the_file_or_with_its_prefix(tmp_path: Path) -> None:
    weights = {"head.weight": exported.weights(8, 16), "group.low.weight": exported.weights(16, 4)}
    nodes = [
        helper.make_node("MatMul", ["x", "head.weight"], ["h"]),
        helper.make_node("MatMul", ["h", "group.low.weight"], ["y"]),
    ]
    file = exported.by_hand(tmp_path / "m.onnx", nodes, weights)
    model = GraphModel(stage.graph_of(stage.open_file(Model(source=str(file), task="tensors"))))
    for pattern, modules in (
        ("head", {"graph.head"}),
        ("graph.head", {"graph.head"}),
        ("h*", {"graph.head"}),
        ("group", {"graph.group", "graph.group.low"}),
        ("g*.low", {"graph.group.low"}),
    ):
        assert set(match_modules(model, (pattern,), "")) == modules, pattern
    with pytest.raises(RecipeError, match=r"matches no module.*head"):
        match_modules(model, ("heat",), "quantize.keep_float")
