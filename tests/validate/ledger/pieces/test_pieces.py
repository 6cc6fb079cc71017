"""The parts of a graph are judged by their limits, and those that nothing limits are marked."""

from __future__ import annotations

from pathlib import Path

from optimizer.lower.onnx import cut
from optimizer.lower.onnx.graph_source import open_graph
from optimizer.validate.ledger.pieces import pieces
from tests.validate.runs import Run


def test_parts_whose_limit_accepts_zeros_are_marked(runs: dict[str, Run], tmp_path: Path) -> None:
    m = runs["static"].materials()
    graph = open_graph(m.graph / "model.onnx")
    names = [*m.correct.module_inputs("folded", m.precision)]
    limits = {name: 0.5 if i % 2 else 1.0 for i, name in enumerate(names)}
    sample = m.samples.of_pieces(m.folded_traces, m.graph / "model.onnx")
    parts = pieces.judge_between(
        graph, cut.edges(graph, m.modules), sample, limits, tmp_path, pieces.AS_WRITTEN
    )
    wide = {name.removesuffix(":0") for name, limit in limits.items() if limit == 1.0}
    marked = {part.module for part in parts if part.accepts_zeros}
    assert marked == wide & {part.module for part in parts}
    assert 0 < len(marked) < len(parts)
