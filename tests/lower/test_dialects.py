"""Both Q/DQ dialects are the state, as their own readers read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from optimizer.compress.simulate import simulate_state
from optimizer.foundation.state import CompressedState, input_name, owner_of
from optimizer.harness.runtimes.ort import exact_integers
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from tests.export.folders import Exported
from tests.lower.running import (
    ORT,
    PLAIN,
    TRT,
    TRT16,
    answer,
    difference,
    lowered,
    read_weights,
    session,
    tokens,
)
from tests.lower.states import PER_CHANNEL, SCHEMES, state_of

FLIPS = 5e-3
"""Relative L2 that a few integers on the other side of a rounding boundary may cause in the tiny
model; quantization itself moves its output by 2e-2."""

SYMMETRIC = [name for name, scheme in SCHEMES.items() if scheme.symmetric]
STATIC: list[dict[str, Any]] = [{}, {"symmetric": True}, {"factored": "dense"}]


@pytest.fixture(scope="module")
def simulate(tiny: Exported) -> Callable[[CompressedState], np.ndarray]:
    """Outputs of the state in torch, on tokens()."""
    model = load_torch_model(open_checkpoint(tiny.source), "sentence-embedding")
    inputs = tokens()

    @torch.no_grad()
    def run(state: CompressedState) -> np.ndarray:
        given = {k: torch.from_numpy(v) for k, v in inputs.items()}
        output = simulate_state(model, state)(**given).last_hidden_state.numpy()
        return np.asarray(output[inputs["attention_mask"].astype(bool)])

    return run


@pytest.mark.parametrize("reader", ["onnx", "onnxruntime"])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_runtimes_own_reader_gives_the_states_weights_bit_for_bit(
    tiny: Exported, tmp_path: Path, name: str, reader: str
) -> None:
    state = state_of(tiny, SCHEMES[name])
    target = TRT if reader == "onnx" and name in SYMMETRIC else ORT
    read = read_weights(lowered(tiny, state, target, tmp_path), tiny.names.modules, reader)
    for module, entry in tiny.names.modules.items():
        wanted = state.weights[entry.parameter].dequantize().numpy()
        assert np.array_equal(read[module], wanted), module


@pytest.mark.parametrize("name", ["int8 channel", "int4 group 32"])
def test_half_precision_weights_are_the_states_rounded_to_half(
    tiny16: Exported, tmp_path: Path, name: str
) -> None:
    state = state_of(tiny16, SCHEMES[name])
    read = read_weights(lowered(tiny16, state, TRT16, tmp_path), tiny16.names.modules, "onnx")
    for module, entry in tiny16.names.modules.items():
        wanted = state.weights[entry.parameter].dequantize().half().numpy()
        assert read[module].dtype == np.float16
        assert np.array_equal(read[module], wanted), module


@pytest.mark.parametrize("name", SCHEMES)
def test_weight_only_files_compute_what_the_state_computes(
    tiny: Exported, tmp_path: Path, simulate: Callable[..., np.ndarray], name: str
) -> None:
    state = state_of(tiny, SCHEMES[name])
    folder = lowered(tiny, state, ORT, tmp_path)
    wanted = simulate(state)
    assert difference(answer(folder, tokens(), optimize=False), wanted) < 1e-6
    # MatMulNBits rounds activations to int8 in blocks of its own accord
    assert difference(answer(folder, tokens()), wanted) < 2e-2


@pytest.mark.parametrize(
    "options", [*STATIC, {"token": True}, {"token": True, "factored": "dense"}]
)
@pytest.mark.parametrize("optimize", [False, True])
def test_integer_files_compute_what_the_state_computes(
    tiny: Exported,
    tmp_path: Path,
    simulate: Callable[..., np.ndarray],
    options: dict[str, Any],
    optimize: bool,
) -> None:
    given = {k: v for k, v in options.items() if k != "token"}
    state = state_of(tiny, PER_CHANNEL, "token" if "token" in options else "tensor", **given)
    folder = lowered(tiny, state, ORT, tmp_path)
    assert difference(answer(folder, tokens(), optimize), simulate(state)) < FLIPS


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("name", ["int4 group 32", "int4 group 32 asymmetric"])
def test_groups_beside_quantized_inputs_compute_what_the_state_computes(
    tiny: Exported,
    tmp_path: Path,
    simulate: Callable[[CompressedState], np.ndarray],
    name: str,
    optimize: bool,
) -> None:
    """Within rounding of a tie: nothing rounds a second time, as MatMulNBits would."""
    state = state_of(tiny, SCHEMES[name], "tensor", factored="dense")
    folder = lowered(tiny, state, ORT, tmp_path)
    assert difference(answer(folder, tokens(), optimize), simulate(state)) < FLIPS


def test_int8_groups_beside_quantized_inputs_do_not_run(tiny: Exported, tmp_path: Path) -> None:
    """ONNX Runtime 1.31 fuses them as if they had one scale per output: why targets/__init__.py
    refuses them."""
    folder = lowered(tiny, state_of(tiny, SCHEMES["int8 group 32"], "tensor"), ORT, tmp_path)
    with pytest.raises(Exception, match="MatMulIntegerToFloat"):
        answer(folder, tokens())


@pytest.mark.parametrize("options", STATIC)
def test_the_two_dialects_compute_the_same(
    tiny: Exported, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(tiny, PER_CHANNEL, "tensor", **options)
    answers = {}
    for name, target in (("ort", ORT), ("plain", PLAIN), ("trt", TRT)):
        (tmp_path / name).mkdir()
        folder = lowered(tiny, state, target, tmp_path / name)
        answers[name] = answer(folder, tokens(), optimize=False)
    assert max(difference(answers[n], answers["trt"]) for n in ("ort", "plain")) < FLIPS
    if options == {"symmetric": True}:
        # as written neither multiplies integers, so nothing has to be optimized to be exact
        monkeypatch.setattr(exact_integers, "list_settings", lambda _: ())
        folders = (tmp_path / name / "lower" for name in ("plain", "trt"))
        plain, trt = (answer(folder, tokens(), optimize=False) for folder in folders)
        assert np.array_equal(plain, trt)


def codes(folder: Path, value: str) -> np.ndarray:
    proto = onnx.load(folder / "model.onnx")
    proto.graph.output.append(onnx.helper.make_empty_tensor_value_info(value))
    run = session(proto.SerializeToString(), optimize=False)
    return np.asarray(run.run([value], tokens())[0]).astype(np.int16)


def test_the_two_dialects_have_the_same_codes_128_apart(tiny: Exported, tmp_path: Path) -> None:
    state = state_of(tiny, PER_CHANNEL, "tensor")
    name = "encoder.layer.0.attention.self.query"
    assert state.ranges[f"{name}:input"].zero_point != 128
    found = []
    for target in (ORT, TRT):
        (tmp_path / target.runtime).mkdir()
        folder = lowered(tiny, state, target, tmp_path / target.runtime)
        found.append(codes(folder, f"{name}/input_codes"))
    apart = found[0].swapaxes(0, 1) - found[1] - 128  # positions come first on a CPU
    assert np.abs(apart).max() <= 1
    assert (apart != 0).mean() < 1e-3


def test_a_row_of_zeros_is_coded_without_dividing_by_zero(tiny: Exported, tmp_path: Path) -> None:
    state = state_of(tiny, PER_CHANNEL, "token")
    folder = lowered(tiny, state, ORT, tmp_path)
    proto = onnx.load(folder / "model.onnx")
    for tensor in proto.graph.initializer:  # the first LayerNorm now gives zeros
        if tensor.name.startswith("embeddings.LayerNorm"):
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(64, np.float32), tensor.name))
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    first = codes(folder, "encoder.layer.0.attention.self.query/input_codes")
    assert (first == 128).all()
    assert np.isfinite(answer(folder, tokens())).all()


def test_a_module_without_a_bias_gets_one_for_the_offset(tiny: Exported, tmp_path: Path) -> None:
    import dataclasses

    import onnx_ir as ir

    from optimizer.export import onnx_file
    from optimizer.lower.ort import qdq as ort_qdq
    from optimizer.lower.trt import qdq as trt_qdq

    def bare() -> ir.Model:
        model = onnx_file.load(tiny.graph / "model.onnx")
        for node in list(model.graph):
            if node.name in ("encoder.layer.0.output.dense/Add",):
                ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
        return model

    state = state_of(tiny, PER_CHANNEL, "tensor")
    name = "encoder.layer.0.output.dense.weight"
    site = input_name(owner_of(name))
    one = {"weights": {name: state.weights[name]}, "ranges": {site: state.ranges[site]}}
    state = dataclasses.replace(state, **one)
    answers = []
    for i, lower in enumerate((ort_qdq.lower, lambda *a: trt_qdq.lower(*a, "fp32"))):
        model = bare()
        lower(model, tiny.names, state)
        (tmp_path / str(i)).mkdir()
        onnx_file.save(model, tmp_path / str(i) / "model.onnx")
        answers.append(answer(tmp_path / str(i), tokens(), optimize=False))
    assert difference(*answers) < 1e-5
