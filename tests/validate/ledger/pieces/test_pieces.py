"""The parts of a graph are judged by their limits, and those that nothing limits are marked."""

from __future__ import annotations

from pathlib import Path

from onnx import helper

from optimizer.lower.onnx import cut
from optimizer.lower.onnx.cut import Edge
from optimizer.lower.onnx.graph_source import open_graph
from optimizer.validate.ledger.pieces import pieces
from tests.load.onnx_model import exported
from tests.validate.runs import Run


def test_parts_whose_limit_accepts_zeros_are_marked(runs: dict[str, Run], tmp_path: Path) -> None:
    m = runs["static"].materials()
    graph = open_graph(m.graph / "model.onnx")
    names = [*m.correct.module_inputs("folded", m.precision)]
    limits = {name: 0.5 if i % 2 else 1.0 for i, name in enumerate(names)}
    sample = m.samples.of_pieces(m.folded_traces, m.graph / "model.onnx")
    parts = pieces.judge_between(
        graph, cut.list_edges(graph, m.modules), sample, limits, tmp_path, pieces.AS_WRITTEN
    )
    wide = {name.removesuffix(":0") for name, limit in limits.items() if limit == 1.0}
    marked = {part.module for part in parts if part.accepts_zeros}
    assert marked == wide & {part.module for part in parts}
    assert 0 < len(marked) < len(parts)


def test_nothing_lies_between_the_modules_of_a_graph_that_is_one_module(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "W"], ["y"])
    file = exported.by_hand(tmp_path / "m.onnx", [node], {"W": exported.weights(8, 4)})
    edges = [Edge("module", "x", "y", 2, 2)]
    assert pieces.judge_between(file, edges, [], {}, tmp_path, pieces.AS_WRITTEN) == []
