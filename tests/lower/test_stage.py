from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from optimizer.export import onnx_file
from optimizer.foundation.errors import LedgerError, OptimizeError
from optimizer.foundation.state import CompressedState, input_name, owner_of
from optimizer.lower import stage
from optimizer.lower.onnx import onnx_lowering, qdq
from optimizer.lower.ort import qdq as qdq_of_ort
from optimizer.recipe.schema import TargetSection
from optimizer.store import CompressedShapes
from tests.export.folders import Exported
from tests.lower.running import ORT, TRT, TRT16, lowered
from tests.lower.states import PER_CHANNEL, SCHEMES, state_of

DENSE = "encoder.layer.1.output.dense"


def only(state: CompressedState, *parameters: str) -> CompressedState:
    sites = {input_name(owner_of(p)) for p in parameters}
    ranges = {site: r for site, r in state.ranges.items() if site in sites}
    weights = {p: state.weights[p] for p in parameters}
    return dataclasses.replace(state, weights=weights, ranges=ranges)


def test_lowering_says_what_became_of_every_module(tiny: Exported, tmp_path: Path) -> None:
    state = only(state_of(tiny, PER_CHANNEL, "tensor"), f"{DENSE}.weight")
    folder = lowered(tiny, state, ORT, tmp_path)
    document = json.loads((folder / "lowering.json").read_text())
    assert document["modules"] == {
        DENSE: {
            "weight": "int8 channel",
            "activation": "uint8",
            "codes": f"{DENSE}.weight_codes",
        }
    }
    assert set(document["float"]) == set(tiny.names.modules) - {DENSE}


@pytest.mark.parametrize(("target", "exact"), [(ORT, True), (TRT, True)])
def test_float32_lowerings_are_declared_exact(
    tiny: Exported, tmp_path: Path, target: TargetSection, exact: bool
) -> None:
    folder = lowered(tiny, only(state_of(tiny, PER_CHANNEL), f"{DENSE}.weight"), target, tmp_path)
    assert json.loads((folder / "lowering.json").read_text())["exact"] is exact


def test_half_precision_is_declared_bounded(tiny16: Exported, tmp_path: Path) -> None:
    folder = lowered(
        tiny16, only(state_of(tiny16, PER_CHANNEL), f"{DENSE}.weight"), TRT16, tmp_path
    )
    assert json.loads((folder / "lowering.json").read_text())["exact"] is False


@pytest.mark.parametrize("target", [ORT, TRT])
def test_the_same_state_lowers_to_the_same_bytes(
    tiny: Exported, tmp_path: Path, target: TargetSection
) -> None:
    state = state_of(tiny, PER_CHANNEL, "tensor", factored="dense")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lowered(tiny, state, target, tmp_path / name)
    for file in ("model.onnx", "lowering.json"):
        found = {(tmp_path / n / "lower" / file).read_bytes() for n in ("a", "b")}
        assert len(found) == 1


def test_no_float_copy_of_a_quantized_weight_is_left(tiny: Exported, tmp_path: Path) -> None:
    folder = lowered(tiny, state_of(tiny, SCHEMES["int4 group 32"]), ORT, tmp_path)
    held = {t.name: t.data_type for t in onnx.load(folder / "model.onnx").graph.initializer}
    assert not {m.parameter for m in tiny.names.modules.values()} & set(held)
    assert held[f"{DENSE}.weight_codes"] == onnx.TensorProto.INT4


def test_modules_that_read_one_tensor_share_its_codes(tiny: Exported, tmp_path: Path) -> None:
    folder = lowered(tiny, state_of(tiny, PER_CHANNEL, "tensor"), ORT, tmp_path)
    graph = onnx.load(folder / "model.onnx").graph
    quantizers = [n for n in graph.node if n.op_type == "QuantizeLinear"]
    assert len(quantizers) == len({n.input[0] for n in quantizers}) == 8  # 4 tensors in 2 layers


def test_modules_whose_ranges_differ_do_not_share(tiny: Exported, tmp_path: Path) -> None:
    state = state_of(tiny, PER_CHANNEL, "tensor")
    site = "encoder.layer.0.attention.self.key:input"
    wider = dataclasses.replace(state.ranges[site], high=state.ranges[site].high * 2)
    state = dataclasses.replace(state, ranges={**state.ranges, site: wider})
    graph = onnx.load(lowered(tiny, state, ORT, tmp_path) / "model.onnx").graph
    assert sum(n.op_type == "QuantizeLinear" for n in graph.node) == 9


def test_a_weight_the_graph_does_not_have_is_named(tiny: Exported, tmp_path: Path) -> None:
    state = state_of(tiny, PER_CHANNEL)
    weights = {**state.weights, "decoder.weight": state.weights[f"{DENSE}.weight"]}
    with pytest.raises(OptimizeError, match=r"decoder\.weight is quantized in the state"):
        lowered(tiny, dataclasses.replace(state, weights=weights), ORT, tmp_path)


@pytest.mark.parametrize("fault", ["codes", "scale"])
def test_a_file_that_lost_a_weight_is_refused(
    tiny: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    real = qdq.packing.to_kn

    def spoiled(array: np.ndarray) -> np.ndarray:
        hit = array.shape == (64, 128) if fault == "codes" else array.shape == (64, 1)
        return real(array[::-1] if hit else array)

    monkeypatch.setattr(qdq.packing, "to_kn", spoiled)
    with pytest.raises(LedgerError, match="reads back from"):
        lowered(tiny, state_of(tiny, PER_CHANNEL), ORT, tmp_path)


def test_weights_above_the_limit_lie_beside_the_model(
    tiny: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = onnx_lowering.onnx_file.save
    monkeypatch.setattr(onnx_lowering.onnx_file, "save", lambda m, p: real(m, p, limit=0))
    folder = lowered(tiny, state_of(tiny, SCHEMES["int4 group 32 asymmetric"]), ORT, tmp_path)
    assert (folder / "model.onnx.data").is_file()


def test_an_estimate_follows_the_file_in_disk_and_the_largest_weight_in_memory() -> None:
    few, many = ({f"{i}": (10_000, 10_000) for i in range(n)} for n in (5, 50))
    assert stage.estimate(ORT, many).memory == stage.estimate(ORT, few).memory
    assert stage.estimate(ORT, {"0": (20_000, 10_000)}).memory > stage.estimate(ORT, few).memory
    assert stage.estimate(TRT16, many).disk * 2 == stage.estimate(ORT, many).disk
    lowered_few = CompressedShapes(few, {"0": (few["0"], 0.5)})
    assert stage.estimate(ORT, lowered_few).disk == stage.estimate(ORT, few).disk - 350_000_000


def test_integers_are_read_when_they_are_written(tiny: Exported) -> None:
    model, state = onnx_file.load(tiny.graph / "model.onnx"), state_of(tiny, PER_CHANNEL)
    qdq_of_ort.lower(model, tiny.names, state)
    written = [v for n, v in model.graph.initializers.items() if n.endswith("_codes")]
    assert len(written) == len(state.weights)
    assert all(isinstance(v.const_value, ir.LazyTensor) for v in written)
