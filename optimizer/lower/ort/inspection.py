"""Read from ONNX Runtime's optimized graph which modules run in integer kernels.

The runtime writes that graph (SessionOptions.optimized_model_filepath); only operators and names
are read. A module counts as fused where an operator of INTEGER uses its integers directly. It runs
in higher precision where they still pass through a DequantizeLinear, or became a float weight. An
embedding counts as fused where rows are taken from its integers, not from a float table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx

from optimizer.lower.onnx.lookup import IDS

INTEGER = frozenset(
    {
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "QAttention",
        "QGemm",
        "QLinearConv",
        "QLinearMatMul",
    }
)
BY_ROW = frozenset({"Gather"})


def inspect(lowered_folder: Path, optimized_model: Path) -> dict[str, Any]:
    """Inspect the graph as ONNX Runtime optimized it. Returns:

    eligible, fused   number of modules lowered to integers, and of those in integer operators only
    wider             names of eligible modules that are not fused
    operators         {integer operator: count}
    """
    modules = json.loads((lowered_folder / "lowering.json").read_text(encoding="utf-8"))["modules"]
    graph = onnx.load(optimized_model, load_external_data=False).graph
    uses: dict[str, set[str]] = {}
    for node in graph.node:
        for operand in node.input:
            uses.setdefault(operand, set()).add(node.op_type)
    counts: dict[str, int] = {}
    for node in graph.node:
        if node.op_type in INTEGER:
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    wider = [
        name
        for name, entry in modules.items()
        if not _is_fused(uses, entry["codes"], BY_ROW if entry["activation"] == IDS else INTEGER)
    ]
    return {
        "eligible": len(modules),
        "fused": len(modules) - len(wider),
        "wider": sorted(wider),
        "operators": dict(sorted(counts.items())),
    }


def _is_fused(uses: dict[str, set[str]], name: str, operators: frozenset[str]) -> bool:
    """Test in ONNX Runtime's optimized graph that every user of the initializer `name`, which the
    runtime may extend, is in `operators`."""
    users = [ops for key, ops in uses.items() if key == name or key.startswith(f"{name}_")]
    return bool(users) and all(op in operators for ops in users for op in ops)
