"""Inverted residuals (EfficientNet-Lite) through the ledger: padding on one side, ReLU6, depthwise
convolutions, corrected biases. A correct run passes in both dialects; each fault is caught at its
hop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from optimizer.compress.apply.weights import bias_correction
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import CompressedState, Range
from optimizer.recipe.schema import TensorRTTarget
from optimizer.validate.ledger import ledger
from optimizer.validate.materials import Materials
from tests.lower.running import session
from tests.validate.ledger.faults import mutations as m
from tests.validate.ledger.models.test_convolutions import one_doubled
from tests.validate.ledger.models.test_images import materials, refused
from tests.validate.runs import Run, first_refused, for_target, lowered_again, make, prove
from tests.vision import recipe

STRIDED = "efficientnet_lite.stages.2.layers.0.depthwise.convolution"
LAST = "efficientnet_lite.stages.4.layers.0.pooled"
LEARNED = {"method": "autoround", "autoround": {"steps": 20}, "activations": {"range": "minmax"}}
CORRECTED = {"method": "rtn", "activations": {"range": "minmax"}, "bias_correction": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("inverted_residuals")
    return make(root / "run", recipe(root, "efficientnet_lite", CORRECTED))


@pytest.fixture(scope="module")
def rtx(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    target = TensorRTTarget(runtime="tensorrt-rtx", float="fp32")
    return for_target(run, tmp_path_factory.mktemp("rtx") / "run", target)


@pytest.fixture(scope="module")
def proven(run: Run, rtx: Run) -> dict[str, Materials]:
    """{dialect: materials that hold at every hop}."""
    clean = prove(materials(run))
    return {"run": clean, "rtx": prove(lowered_again(clean, rtx), "lower")}


def test_a_correct_run_passes_in_both_dialects(proven: dict[str, Materials]) -> None:
    assert {name: each.signed for name, each in proven.items()} == {"run": False, "rtx": True}


def test_a_correct_run_passes_where_the_convolutions_that_cost_most_stay_float(
    tmp_path: Path,
) -> None:
    """A convolution before one of them returns floats, which no integer kernel does."""
    auto = {"max_error": 0.002, "max_share": 0.9}
    static = {"method": "rtn", "activations": {"range": "minmax"}}
    made = recipe(tmp_path, "efficientnet_lite", {**static, "keep_float_auto": auto})
    target = made.targets[0].model_copy(update={"allow_precision_fallback": True})
    some = materials(make(tmp_path / "run", made.model_copy(update={"targets": (target,)})))
    assert any(note.why.startswith("keep_float_auto") for note in some.state.notes)
    assert len(some.state.weights) > 1
    assert refused(ledger.run(some)) == []


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("learned_rounding")
    return make(root / "run", recipe(root, "efficientnet_lite", LEARNED))


@pytest.fixture(scope="module")
def learned_proven(learned: Run) -> Materials:
    return prove(materials(learned))


def test_a_correct_run_of_learned_rounding_passes_in_both_dialects(
    learned: Run, learned_proven: Materials, tmp_path: Path
) -> None:
    target = TensorRTTarget(runtime="tensorrt-rtx", float="fp32")
    other = for_target(learned, tmp_path / "rtx", target)
    prove(lowered_again(learned_proven, other), "lower")


def negated(q: QTensor) -> QTensor:
    codes = q.integers.clone()
    codes[0] = -codes[0]
    return replace(q, integers=codes)


def scaled(q: QTensor) -> QTensor:
    scale = q.scale.clone()
    scale[0] *= 1.03125
    return replace(q, scale=scale)


def rounded_away(q: QTensor) -> QTensor:
    """Move an integer by two steps."""
    codes = q.integers.clone()
    codes[0, 0] += 2 if codes[0, 0] < 0 else -2
    return replace(q, integers=codes)


@pytest.mark.parametrize("edit", [negated, scaled, rounded_away])
def test_what_no_learning_can_do_to_a_channel_is_caught_where_it_is_compressed(
    learned_proven: Materials, tmp_path: Path, edit: Callable[[QTensor], QTensor]
) -> None:
    refused_at = first_refused(learned_proven, tmp_path, m.weight(STRIDED, edit))
    # biases are multiples of a scale, and `fold` checks them first
    assert refused_at == ("fold" if edit is scaled else "compress")


def test_onnx_runtime_runs_every_convolution_and_the_add_in_integers(
    run: Run, tmp_path: Path
) -> None:
    """ReLU6 is the end of the integers' range, so no Clip remains."""
    session(run.folder("model") / "model.onnx", optimized=tmp_path / "optimized.onnx")
    kernels = [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node]
    convolutions = len(materials(run).state.weights)
    assert kernels.count("QLinearConv") == convolutions == 2 + 2 + 3 * 3
    assert kernels.count("QLinearAdd") == 1
    assert not {"Conv", "Clip", "Pad"} & set(kernels)


def test_biases_are_corrected_by_what_rounding_takes_from_the_mean(run: Run) -> None:
    corrections = bias_correction.read(run.folder("state"))
    assert set(corrections) == {f"{n}.bias" for n in materials(run).state.modules}
    assert any(bool(c.any()) for c in corrections.values())


def sides_swapped(graph: onnx.GraphProto) -> None:
    """Pad above and on the left, as PyTorch's own padding does, not as TensorFlow's."""
    node = next(n for n in graph.node if n.op_type == "Conv" and n.name.startswith(STRIDED))
    (pads,) = (a for a in node.attribute if a.name == "pads")
    assert list(pads.ints) == [0, 0, 1, 1]
    pads.CopyFrom(helper.make_attribute("pads", [1, 1, 0, 0]))


def bias_moved(state: CompressedState) -> CompressedState:
    name = f"{STRIDED}.bias"
    value = state.replaced[name].clone()
    value[0] += 4 * float(value.abs().max())
    return replace(state, replaced={**state.replaced, name: value})


def padded_by_the_middle(graph: onnx.GraphProto) -> None:
    pad = next(n for n in graph.node if n.op_type == "Pad" and n.name.startswith(STRIDED))
    tensor = m.tensor(graph, pad.input[2])
    assert numpy_helper.to_array(tensor) != 0
    tensor.CopyFrom(numpy_helper.from_array(np.zeros((), np.float32), tensor.name))


# fault: (dialect, hop it is planted at, edit)
MUTANTS: dict[str, tuple[str, str, m.Edit]] = {
    "a bias that its correction does not explain": ("run", "fold", m.edit_state(bias_moved)),
    "a range twice too wide in front of pooling": (
        "run", "compress", m.site(LAST, lambda r: Range(r.low, 2 * r.high))),
    "padding on the other sides in the float graph": (
        "run", "export", m.edit_onnx("graph", sides_swapped)),
    "padding on the other sides": ("run", "lower", m.edit_onnx("model", sides_swapped)),
    "the scale of one depthwise channel doubled": (
        "run", "lower", m.values("model", f"{STRIDED}.weight_scale", one_doubled)),
    "the zero point in front of pooling moved by one": (
        "run", "lower", m.values("model", f"{LAST}/input_zero_point", lambda z: z + 1)),
    "padding with the middle of the range, not with 0": (
        "rtx", "lower", m.edit_onnx("model", padded_by_the_middle)),
}  # fmt: skip


@pytest.mark.parametrize(("dialect", "hop", "edit"), MUTANTS.values(), ids=MUTANTS.keys())
def test_a_fault_is_caught_at_its_hop(
    proven: dict[str, Materials], tmp_path: Path, dialect: str, hop: str, edit: m.Edit
) -> None:
    assert first_refused(proven[dialect], tmp_path, edit) == hop
