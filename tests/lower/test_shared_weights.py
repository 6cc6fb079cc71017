"""One weight, several operators: shared layers, and a matrix that is also an embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from optimizer.compress.simulate import simulate_state
from optimizer.export import names, onnx_file
from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.state import CompressedState
from optimizer.harness.runtimes.ort import exact_integers
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.lower.onnx.qdq import read_back
from optimizer.lower.ort import qdq as ort_qdq
from optimizer.lower.ort.inspection import inspect
from optimizer.lower.trt import qdq as trt_qdq
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from tests.export.folders import Exported
from tests.export.graphs import graph
from tests.lower.running import ORT, TRT, answer, difference, lowered, session, tokens
from tests.lower.states import PER_CHANNEL, SCHEMES, rounded, state_of


def test_a_shared_layer_is_lowered_wherever_it_is_used(albert: Exported, tmp_path: Path) -> None:
    assert {len(m.also) for m in albert.names.modules.values()} == {0, 1}
    state = state_of(albert, PER_CHANNEL, "tensor", factored="ffn")
    folder = lowered(albert, state, ORT, tmp_path)
    session(folder / "model.onnx", optimized=tmp_path / "optimized.onnx")
    found = inspect(folder, tmp_path / "optimized.onnx")
    assert found["wider"] == []
    uses = sum(1 + len(m.also) for m in albert.names.modules.values())
    assert found["operators"] == {"MatMulIntegerToFloat": uses}


@pytest.mark.parametrize("activations", ["tensor", "token"])
def test_a_shared_layer_opens_where_weights_are_moved_to_uint8(
    albert: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activations: Any
) -> None:
    """ONNX Runtime names the moved weight after the value, and refuses the name a second time."""
    monkeypatch.setattr(exact_integers, "list_settings", lambda _: (exact_integers.EXACT,))
    state = state_of(albert, PER_CHANNEL, activations)
    folder = lowered(albert, state, ORT, tmp_path)
    assert difference(run(folder), simulated_outputs(albert, state)) < 1e-2


def test_a_shared_layer_of_weights_alone_is_fused_wherever_it_is_used(
    albert: Exported, tmp_path: Path
) -> None:
    state = state_of(albert, SCHEMES["int4 group 32"], None)
    folder = lowered(albert, state, ORT, tmp_path)
    session(folder / "model.onnx", optimized=tmp_path / "optimized.onnx")
    found = inspect(folder, tmp_path / "optimized.onnx")
    assert found["wider"] == []
    uses = sum(1 + len(m.also) for m in albert.names.modules.values())
    assert found["operators"] == {"MatMulNBits": uses}


def test_copies_of_a_shared_weight_are_read_back_too(albert: Exported, tmp_path: Path) -> None:
    state = state_of(albert, SCHEMES["int4 group 32"], None)
    model = onnx_file.load(lowered(albert, state, ORT, tmp_path) / "model.onnx")
    name = next(m.parameter for m in albert.names.modules.values() if m.also)
    assert np.array_equal(read_back(model, name), state.weights[name].dequantize().numpy())
    scale = model.graph.initializers[f"{name}_scale_1"]
    scale.const_value = ir.tensor(scale.const_value.numpy() * np.float32(1.01), name=scale.name)
    with pytest.raises(OptimizeError, match=f"{name}_scale_1 differs from"):
        read_back(model, name)


@pytest.mark.parametrize("target", [ORT, TRT], ids=["ort", "trt"])
def test_a_shared_layer_computes_what_the_state_computes(
    albert: Exported, tmp_path: Path, target: object
) -> None:
    state = state_of(albert, PER_CHANNEL, "tensor", factored="ffn")
    folder = lowered(albert, state, target, tmp_path)
    given = run(folder) if target is ORT else answer(folder, tokens(), optimize=False)
    assert difference(given, simulated_outputs(albert, state)) < 1e-2


def run(folder: Path) -> np.ndarray:
    """Operator by operator, its integer products exact on every processor."""
    with OrtRunner(folder / "model.onnx", threads=1, fuse=False) as runner:
        output = runner.infer(tokens())["last_hidden_state"]
    return np.asarray(output)[tokens()["attention_mask"].astype(bool)]


def simulated_outputs(made: Exported, state: CompressedState) -> np.ndarray:
    """Outputs of the state in torch."""
    model = load_torch_model(open_checkpoint(made.source), "sentence-embedding")
    with torch.no_grad():
        given = {k: torch.from_numpy(v) for k, v in tokens().items()}
        wanted = simulate_state(model, state)(**given).last_hidden_state.numpy()
    return np.asarray(wanted)[tokens()["attention_mask"].astype(bool)]


@pytest.mark.parametrize("dialect", ["ort", "trt"])
def test_a_tied_embedding_keeps_its_float_rows(dialect: str) -> None:
    weight = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    model = graph(
        "g (float[n, 32] x, int64[m] i) => (float[n, 16] y, float[m, 32] e)"
        "{ t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t) e = Gather(w, i) }",
        w=weight,
    )
    model.graph.initializers["w"].name = "head.weight"
    for node in model.graph:
        node.name = f"head/{node.op_type}"
    value = torch.from_numpy(weight)
    found = names.pair(model, {"head.weight": value}, ["head"])
    state = CompressedState({"head.weight": rounded(value, PER_CHANNEL)})
    if dialect == "ort":
        ort_qdq.lower(model, found, state)
    else:
        trt_qdq.lower(model, found, state, "fp32")
    x = np.eye(32, dtype=np.float32)
    rows = np.arange(16)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    y, e = ReferenceEvaluator(proto).run(None, {"x": x, "i": rows})
    assert np.array_equal(y.T, state.weights["head.weight"].dequantize().numpy())
    assert np.array_equal(e, weight)
