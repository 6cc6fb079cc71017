"""Write and verify the ONNX file of a lowering, and its lowering.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from optimizer.export import onnx_file
from optimizer.export.names import GraphNames, from_dict
from optimizer.foundation import state as compressed_state
from optimizer.foundation.errors import LedgerError
from optimizer.foundation.state import CompressedState
from optimizer.lower.onnx.qdq import name_codes, read_back, release
from optimizer.lower.ort import pack

VALUES = 1 << 22
"""Values of a weight that are compared at once."""


@dataclass(frozen=True)
class Lowered:
    """Model lowered to a dialect, with the facts for lowering.json.

    activations: {module: type of its quantized input}
    packed: {module: initializer with its integers}, where the dialect moved them
    attention: entry of lowering.json (lower/stage.py); None for a model without fused attentions
    zeros: sentence on the runtime's treatment of pruned weights
    """

    dialect: str
    model: ir.Model
    activations: Mapping[str, str]
    packed: Mapping[str, str] = field(default_factory=dict)
    attention: Mapping[str, Any] | None = None
    zeros: str = ""


def read(graph: Path, state: Path) -> tuple[ir.Model, GraphNames, CompressedState]:
    """Read graph and names from the export stage's folder, the state from the compress stage's."""
    names = from_dict(json.loads((graph / "names.json").read_text(encoding="utf-8")))
    return onnx_file.load(graph / "model.onnx"), names, compressed_state.read(state)


def write(
    lowered: Lowered, names: GraphNames, state: CompressedState, float_type: str, out: Path
) -> None:
    """Write the lowered model.onnx and lowering.json into `out`, and check the file's weights with
    `verify`.

    float_type: "fp32" or "fp16"
    Raises LedgerError for a weight that reads back differently.
    """
    onnx_file.save(lowered.model, out / "model.onnx")
    verify(out / "model.onnx", names, state)
    parameter_of = names.parameter_of
    modules = {
        name: {
            "weight": str(state.scheme(parameter_of[name])),
            "activation": activation,
            "codes": lowered.packed.get(name, name_codes(parameter_of[name])),
        }
        for name, activation in lowered.activations.items()
    }
    document = {
        "dialect": lowered.dialect,
        "exact": float_type == "fp32",
        "modules": modules,
        "float": sorted(set(names.modules) - set(modules)),
        "attention": lowered.attention,
        **({"summands": sorted(state.summands)} if state.summands else {}),
        **_sparse(lowered, names, state),
    }
    text = json.dumps(document, indent=1, sort_keys=True)
    (out / "lowering.json").write_text(text, encoding="utf-8")


def _sparse(lowered: Lowered, names: GraphNames, state: CompressedState) -> dict[str, Any]:
    """Build the entries of lowering.json about pruned weights."""
    modules = {n: state.sparsity[p] for n, p in names.parameter_of.items() if p in state.sparsity}
    if not modules:
        return {}
    patterns = " and ".join(sorted(set(modules.values())))
    return {
        "sparsity": modules,
        "notes": [f"{len(modules)} modules are sparse ({patterns}): {lowered.zeros}"],
    }


def verify(path: Path, names: GraphNames, state: CompressedState) -> None:
    """Check the lowered graph: read every weight back from the written file, some rows at a time;
    LedgerError for the first that differs."""
    model = onnx_file.load(path)
    pack.unpack(model)
    for parameter in names.parameter_of.values():
        if parameter not in state.weights:
            continue
        q = state.weights[parameter]
        count, inputs = q.integers.shape
        at_once = max(1, VALUES // inputs)
        for rows in (slice(i, i + at_once) for i in range(0, count, at_once)):
            read = read_back(model, parameter, rows)
            if not np.array_equal(read, q.dequantize(rows).numpy()):
                raise LedgerError(
                    f"{parameter} reads back from {path.name} with other values than the "
                    "compressed state has",
                    where="lower: state -> file",
                    accepted="equality",
                )
        release(model, parameter)
