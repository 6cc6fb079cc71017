"""A network of convolutions through the ledger: a correct run passes in both dialects, and each
fault is caught at its hop, at none before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from torch import nn

from optimizer.compress.convolutions import compute_bias_step, round_bias
from optimizer.foundation.state import CompressedState, Range
from optimizer.model.checkpoint import batch_norms, checkpoint
from optimizer.recipe.schema import TensorRTTarget
from optimizer.validate.ledger import ledger
from optimizer.validate.materials import Materials
from tests.lower.running import session
from tests.validate.ledger.faults import mutations as m
from tests.validate.ledger.models.test_images import materials
from tests.validate.runs import Run, first_refused, for_target, lowered_again, make, prove
from tests.vision import recipe

BLOCK = "regnet.encoder.stages.1.layers.0"
DEPTHWISE = f"{BLOCK}.layer.1.convolution"
IN_FRONT = f"{BLOCK}.layer.2.activation"
STATIC = {"method": "rtn", "activations": {"range": "minmax"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("regnet_run")
    return make(root / "run", recipe(root, "regnet", STATIC))


@pytest.fixture(scope="module")
def rtx(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    target = TensorRTTarget(runtime="tensorrt-rtx", float="fp32")
    return for_target(run, tmp_path_factory.mktemp("rtx") / "run", target)


@pytest.fixture(scope="module")
def proven(run: Run, rtx: Run) -> dict[str, Materials]:
    """{dialect: materials that hold at every hop}."""
    clean = prove(materials(run))
    return {"run": clean, "rtx": prove(lowered_again(clean, rtx), "lower")}


def test_a_correct_run_passes_on_onnx_runtime(proven: dict[str, Materials]) -> None:
    entry = ledger.run_hop(ledger.hops.engine, proven["run"])
    # 11 convolutions and 6 summands, of which 3 read integers of another; and the classifier
    assert len(entry.pieces) == (11 - 2) + (6 - 1) + (11 + 1)


def test_a_residual_add_between_convolutions_is_of_integers(run: Run, tmp_path: Path) -> None:
    path = run.folder("model") / "model.onnx"
    session(path, optimized=tmp_path / "optimized.onnx")
    kernels = [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kernels.count("QLinearConv") == 11
    assert kernels.count("QLinearAdd") == 2  # and the last, whose sum is read in float, is not
    graph = onnx.load(path).graph
    read = [n.input[0] for n in graph.node if n.op_type == "QuantizeLinear"]
    assert len(read) == len(set(read))


def test_a_correct_run_passes_in_the_other_dialect(proven: dict[str, Materials]) -> None:
    assert proven["rtx"].signed


def padded_by(value: Any) -> Callable[[onnx.GraphProto], None]:
    """Pad the depthwise convolution's image with the integer of the centred range."""

    def change(graph: onnx.GraphProto) -> None:
        pad = next(n for n in graph.node if n.op_type == "Pad" and n.name.startswith(DEPTHWISE))
        tensor = m.tensor(graph, pad.input[2])
        array = np.asarray(value, numpy_helper.to_array(tensor).dtype)
        assert not np.array_equal(array, numpy_helper.to_array(tensor))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    return change


def steps_off(state: CompressedState) -> CompressedState:
    name, covered = f"{DEPTHWISE}.bias", state.range_of(DEPTHWISE)
    scale = state.weight_of(DEPTHWISE).scale
    assert covered is not None
    moved = state.replaced[name].double() + 3 * compute_bias_step(covered, scale)
    bias = round_bias(moved.float(), covered, scale)
    return replace(state, replaced={**state.replaced, name: bias})


def one_doubled(scale: Any) -> Any:
    return scale * (1 + (np.arange(scale.size) == 3))


# fault: (dialect, hop it is planted at, edit)
MUTANTS: dict[str, tuple[str, str, m.Edit]] = {
    "the scale of one depthwise channel doubled in the state": (
        "run", "compress", m.weight(DEPTHWISE, m.one_channel_doubled)),
    "a range twice too wide in front of a residual add": (
        "run", "compress", m.site(IN_FRONT, lambda r: Range(2 * r.low, 2 * r.high))),
    "a bias that is not of steps of its sums": (
        "run", "fold", m.replaced(f"{DEPTHWISE}.bias", lambda b: b * 1.001)),
    "a bias three steps of its sums off": ("run", "fold", m.edit_state(steps_off)),
    "a bias dropped": ("run", "export", m.values("graph", f"{DEPTHWISE}.bias", lambda b: 0 * b)),
    "the scale of one depthwise channel doubled": (
        "run", "lower", m.values("model", f"{DEPTHWISE}.weight_scale", one_doubled)),
    "the zero point of a depthwise convolution moved by one": (
        "run", "lower", m.values("model", f"{DEPTHWISE}/input_zero_point", lambda z: z + 1)),
    "the zero point in front of a residual add moved by one": (
        "run", "lower", m.values("model", f"{IN_FRONT}/input_zero_point", lambda z: z + 1)),
    "one integer of a bias": (
        "run", "lower", m.values("model", f"{DEPTHWISE}/bias_codes", m.first_integer_moved)),
    "padding with the middle of the range, not with 0": (
        "rtx", "lower", m.edit_onnx("model", padded_by(0.0))),
}  # fmt: skip


@pytest.mark.parametrize(("dialect", "hop", "edit"), MUTANTS.values(), ids=MUTANTS.keys())
def test_a_fault_is_caught_at_its_hop(
    proven: dict[str, Materials], tmp_path: Path, dialect: str, hop: str, edit: m.Edit
) -> None:
    assert first_refused(proven[dialect], tmp_path, edit) == hop


def test_another_epsilon_of_the_norms_is_caught_where_the_checkpoint_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epsilon is another framework's default, in the arithmetic alone."""
    right = batch_norms.fold

    def wrong(weight: Any, bias: Any, norm: Any, _: float) -> Any:
        return right(weight, bias, norm, 1e-3)

    monkeypatch.setattr(checkpoint, "fold", wrong)
    assert ledger.run_hop(ledger.hops.load, materials(run)).ok is False


def test_what_stays_float_is_said_with_the_reason(run: Run) -> None:
    found = materials(run)
    notes = {n.module: n.why for n in found.state.notes}
    assert notes["regnet.embedder.embedder.convolution"].startswith("outside the blocks")
    filters = [n for n, x in found.float_model.named_modules() if isinstance(x, nn.Conv2d)]
    assert {*filters, "classifier.1"} == {*notes, *found.state.modules}
