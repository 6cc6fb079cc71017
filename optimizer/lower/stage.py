"""lower: the float graph and the compressed state become one target's own format.

Writes model.onnx (and model.onnx.data above 2 GiB) and lowering.json:
    dialect   "ort_qdq" | "trt_qdq"
    exact     whether the file's weights are the state's, bit for bit, in the float type the
              file computes in (fp16 rounds code * scale to its 11 bits)
    modules   {module: {weight: "int8 channel", activation: "uint8", codes: initializer}}; the
              activation of an embedding is "ids"
    float     [module, ...] linear modules left as they were
    attention null | {fused: [module, ...], left: {layer: why}}: a decoder's attentions on ONNX
              Runtime
Before it is done every weight is read back from the file and compared with the state.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from optimizer import state as compressed_state
from optimizer.errors import LedgerError
from optimizer.export import onnx_file
from optimizer.export.names import Names, from_dict
from optimizer.harness import contract as contracts
from optimizer.harness.contract import Contract
from optimizer.lower import (
    ort_attention,
    ort_norm,
    ort_pack,
    ort_past_length,
    ort_qdq,
    trt_qdq,
)
from optimizer.lower.qdq import codes_name, read_back
from optimizer.progress import say
from optimizer.qtensor import Scheme
from optimizer.recipe.schema import OnnxRuntimeTarget, TensorRTTarget
from optimizer.state import CompressedState
from optimizer.store import Estimate, Shapes, Stage
from optimizer.targets import TARGETS

Target = OnnxRuntimeTarget | TensorRTTarget


def run(target: Target, source: Path, state: Path, graph: Path, *, out: Path) -> None:
    """graph: the export stage's folder; state: the compress stage's; source: the load stage's, for
    its contract.

    Raises OptimizeError when the state holds a weight the graph does not, LedgerError when the
    written file does not give the state's weights back.
    """
    compressed = compressed_state.read(state)
    names = from_dict(json.loads((graph / "names.json").read_text(encoding="utf-8")))
    model = onnx_file.load(graph / "model.onnx")
    dialect = TARGETS[target.runtime].lowering
    attention, packed = None, dict[str, str]()
    if dialect == "ort_qdq":
        attention = _decoder(model, target, contracts.read(source / "contract.json"))
        coded = ort_qdq.lower(model, names, compressed)
        packed = ort_pack.pack(model) if attention else {}
    else:
        coded = trt_qdq.lower(model, names, compressed, target.export.float)
    onnx_file.save(model, out / "model.onnx")
    verify(out / "model.onnx", names, compressed)
    held = names.parameter_of
    modules = {
        name: {
            "weight": describe(compressed.weights[held[name]].scheme),
            "activation": activation,
            "codes": packed.get(name, codes_name(held[name])),
        }
        for name, activation in coded.items()
    }
    document = {
        "dialect": dialect,
        "exact": target.export.float == "fp32",
        "modules": modules,
        "float": sorted(set(names.modules) - set(modules)),
        "attention": attention,
    }
    text = json.dumps(document, indent=1, sort_keys=True)
    (out / "lowering.json").write_text(text, encoding="utf-8")


def _decoder(model: ir.Model, target: Target, contract: Contract) -> dict[str, Any] | None:
    """A decoder's attentions and norms as ONNX Runtime's own operators, in place; what of it."""
    if not contract.task_record.generates or target.runtime != "onnxruntime":
        return None
    if not target.fuse_attention:
        return {"fused": [], "left": {"all": "fuse_attention: false"}}
    if target.device == "cuda" and target.export.float == "fp32":
        why = "ONNX Runtime's GroupQueryAttention takes no fp32 on CUDA, it would run on the CPU"
        return {"fused": [], "left": {"all": why}}
    fused = ort_attention.fuse(model, contract.decoder.context)
    if ort_attention.SHARED in model.metadata_props.items():
        others = ort_past_length.count(model)
        if others:
            del model.metadata_props[ort_attention.SHARED[0]]
            say(f"lower: {others[0]} reads the cache's shape, so past and present share no buffer")
    ort_norm.fuse(model)
    for layer, why in list(fused.left.items())[:3]:
        say(f"lower: attention of {layer} runs in plain operators, slower: {why}")
    return {"fused": list(fused.modules), "left": dict(fused.left)}


def describe(scheme: Scheme) -> str:
    """ "int8 channel", "int4 group 64", "int4 group 32 asymmetric"."""
    words = [f"int{scheme.bits}", scheme.granularity]
    words += [str(scheme.group_size)] if scheme.group_size else []
    return " ".join(words + ([] if scheme.symmetric else ["asymmetric"]))


def verify(path: Path, names: Names, state: CompressedState) -> None:
    """Read every weight back from the written file; LedgerError for the first that differs."""
    model = onnx_file.load(path)
    ort_pack.unpack(model)
    for parameter in names.parameter_of.values():
        if parameter not in state.weights:
            continue
        wanted = state.weights[parameter].dequantize().numpy()
        if not np.array_equal(read_back(model, parameter), wanted):
            raise LedgerError(
                f"{parameter} reads back from {path.name} with other values than the "
                "compressed state has",
                where="lower: state -> file",
                accepted="equality",
            )


def estimate(target: Target, shapes: Shapes) -> Estimate:
    """Disk is an upper bound: as if every weight stayed float."""
    elements = sum(map(prod, shapes.values()))
    width = 2 if target.export.float == "fp16" else 4
    largest = max(map(prod, shapes.values()), default=0)
    return Estimate(
        memory=(400 << 20) + 2 * width * elements + 8 * largest,
        disk=width * elements,
        seconds=0.5 + elements / 50e6,
    )


STAGE = Stage("lower", 2, run, packages=("onnx", "onnx-ir"), estimate=estimate)
