"""Lowered folders, and what runtimes make of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

from optimizer.foundation.state import CompressedState
from optimizer.harness.runtimes.ort import exact_integers
from optimizer.harness.runtimes.ort.run import FLOAT_ACTIVATIONS
from optimizer.lower import stage as lower
from optimizer.recipe.schema import OnnxRuntimeTarget, TensorRTTarget
from tests.export.folders import Exported, stated

ORT = OnnxRuntimeTarget(runtime="onnxruntime")
PLAIN = OnnxRuntimeTarget(
    runtime="onnxruntime",
    device="cuda",
    provider="tensorrt",
    float="fp32",
    allow_precision_fallback=True,
)
"""Its dialect without operators of ONNX Runtime's own."""
TRT = TensorRTTarget(runtime="tensorrt-rtx", float="fp32")
TRT16 = TensorRTTarget(runtime="tensorrt-rtx", float="fp16")
Arrays = dict[str, np.ndarray]


def lowered(made: Exported, state: CompressedState, target: Any, out: Path) -> Path:
    """The folder the stage writes, which has checked itself."""
    folder = stated(state, out / "state")
    (out / "lower").mkdir()
    lower.run(target, made.source, folder, made.graph, out=out / "lower")
    return out / "lower"


def session(
    model: Path | bytes, optimize: bool = True, optimized: Path | None = None
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    levels = ort.GraphOptimizationLevel
    entries = exact_integers.list_settings(
        ort
    )  # where products saturate; it needs an optimized graph
    as_written = levels.ORT_ENABLE_EXTENDED if entries else levels.ORT_DISABLE_ALL
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else as_written
    for entry in (*entries, *(() if optimize else (FLOAT_ACTIVATIONS,))):
        options.add_session_config_entry(*entry)
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    given = model if isinstance(model, bytes) else str(model)
    return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def tokens(batch: int = 4, sequence: int = 16, vocabulary: int = 120) -> Arrays:
    """Inputs of the tiny encoder, with padding in every row but the first."""
    rng = np.random.default_rng(batch * 100 + sequence)
    lengths = sequence - np.arange(batch) * sequence // (batch + 1)
    mask = (np.arange(sequence)[None] < lengths[:, None]).astype(np.int64)
    return {
        "input_ids": rng.integers(5, vocabulary, (batch, sequence)) * mask,
        "attention_mask": mask,
        "token_type_ids": np.zeros_like(mask),
    }


def answer(folder: Path, inputs: Arrays, optimize: bool = True) -> np.ndarray:
    output = session(folder / "model.onnx", optimize).run(["last_hidden_state"], inputs)[0]
    return np.asarray(output)[inputs["attention_mask"].astype(bool)]


def part(model: Path, values: Iterable[str]) -> bytes:
    """A model of the constant values only, e.g. de-quantized weights, as its outputs."""
    proto = onnx.load(model)
    wanted = set(values)
    nodes = [n for n in proto.graph.node if n.output[0] in wanted]
    needed = {i for n in nodes for i in n.input}
    outputs = [onnx.helper.make_empty_tensor_value_info(v) for v in sorted(wanted)]
    graph = onnx.helper.make_graph(
        nodes, "part", [], outputs, [t for t in proto.graph.initializer if t.name in needed]
    )
    made = onnx.helper.make_model(graph, opset_imports=proto.opset_import, ir_version=10)
    return bytes(made.SerializeToString())


def read_weights(folder: Path, modules: Iterable[str], reader: str) -> Arrays:
    """{module: weight (out, in)} as "onnx" (its reference) or "onnxruntime" de-quantizes it."""
    names = sorted(f"{m}/weight" for m in modules)
    model = part(folder / "model.onnx", names)
    if reader == "onnx":
        values = ReferenceEvaluator(onnx.load_from_string(model)).run(None, {})
    else:
        values = session(model, optimize=False).run(names, {})
    return {
        name.removesuffix("/weight"): np.asarray(value).T
        for name, value in zip(names, values, strict=True)
    }


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Relative L2 of a to b."""
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))
