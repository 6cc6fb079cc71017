"""The first node that matters: at fault, beyond the budget, or with the largest error."""

from __future__ import annotations

from typing import Any

import pytest

from optimizer.validate.ledger.onnx_file import findings
from optimizer.validate.ledger.onnx_file.findings import Fault


def row(node: str, alone: float, through: float, module: str = "") -> dict[str, Any]:
    return {
        "node": node,
        "operator": "Conv2d" if module else "Relu",
        "module": module,
        "output": f"{node}:0",
        "quantized": bool(module),
        "alone": alone,
        "through": through,
    }


ROWS = [
    row("stem", 0.01, 0.01, "graph.stem"),
    row("act", 1e-8, 0.02),
    row("pool", 1e-7, 0.3),
    row("head", 0.02, 0.31, "graph.head"),
]
OTHER = Fault("graph.other", "no node of the file")


@pytest.mark.parametrize(
    ("budget", "faults", "node", "kind"),
    [
        (0.4, [], "head", "largest"),
        (0.2, [], "pool", "budget"),
        (0.2, [OTHER, Fault("graph.stem", "a scale")], "stem", "fault"),
        (0.2, [Fault("graph.head", "a scale"), Fault("graph.stem", "another")], "stem", "fault"),
        (0.4, [Fault("graph.head", "the part before it", before=True)], "pool", "fault"),
        (0.4, [Fault("pool:0", "an output", before=True)], "pool", "fault"),
        (0.4, [OTHER], "head", "largest"),
    ],
)
def test_the_first_node_that_matters_is_named(
    budget: float, faults: list[Fault], node: str, kind: str
) -> None:
    report = {
        "ledger": [{"hop": "compress", "tolerance": budget}],
        "nodes": {"from": "the file", "rows": 8, "nodes": ROWS, "not_compared": ["shape"]},
    }
    facts = findings.collect_facts(report, faults)
    assert facts is not None
    assert (facts["first"]["node"], facts["first"]["kind"]) == (node, kind)
    lines = findings.write_summary(facts)
    expected = "no node is at fault" if kind == "largest" else f"first that matters: {node!r}"
    assert expected in lines[1]
    assert "own errors of nodes: 'head'" in lines[2]
    assert len(findings.write_table(facts)) == 2 + len(ROWS)


def test_a_report_without_nodes_says_why() -> None:
    others = {"from": "the file", "why": "it does not run"}, {"from": "the file", "nodes": []}
    for nodes, words in zip((None, *others), ("not an ONNX", "not run", "share no"), strict=True):
        report = {"target": "t", "verdict": "pass", "ledger": [], "nodes": nodes}
        assert findings.collect_facts(report, []) is None
        assert words in findings.explain_none(report)
