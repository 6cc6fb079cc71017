"""What ONNX Runtime really runs in integer kernels, read from the graph it optimized.

The runtime writes that graph (SessionOptions.optimized_model_filepath); only its operators and
names are read here. A module counts as fused when an integer operator of INTEGER uses its codes
directly; when its codes still pass through a DequantizeLinear at run time, or the runtime
turned them back into a float weight, the module runs in higher precision. An embedding multiplies
nothing: it counts when rows are still taken from its codes, and not from a table made of them.
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
    """{"eligible": modules lowered to codes, "fused": those in integer operators everywhere they
    are used, "wider": the names of the others, "operators": {operator: count}}."""
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
        if not _fused(uses, entry["codes"], BY_ROW if entry["activation"] == IDS else INTEGER)
    ]
    return {
        "eligible": len(modules),
        "fused": len(modules) - len(wider),
        "wider": sorted(wider),
        "operators": dict(sorted(counts.items())),
    }


def _fused(uses: dict[str, set[str]], codes: str, operators: frozenset[str]) -> bool:
    """Whether every user of the codes is one of these operators.

    The runtime keeps an initializer's name, or derives the packed one's from it.
    """
    users = [ops for name, ops in uses.items() if name == codes or name.startswith(f"{codes}_")]
    return bool(users) and all(op in operators for ops in users for op in ops)
