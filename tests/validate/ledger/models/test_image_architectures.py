"""Swin, ConvNeXt, EfficientNet and MobileNetV2 through the ledger: a correct run passes in both
dialects with every quantized module in integer kernels, and each fault is caught at its hop."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from optimizer.foundation.state import Range
from optimizer.recipe.compression.sparsity import Sparsity
from optimizer.recipe.schema import TensorRTTarget
from optimizer.validate.ledger import ledger
from optimizer.validate.ledger.laws import sparsity_laws
from optimizer.validate.materials import Materials
from tests.harness.runtimes.openvino import integer_sums
from tests.lower.running import session
from tests.validate.ledger.faults import mutations as m
from tests.validate.ledger.models.test_convolutions import one_doubled
from tests.validate.ledger.models.test_images import materials
from tests.validate.runs import (
    Run,
    first_refused,
    for_openvino,
    for_target,
    hops_from,
    lowered_again,
    make,
    prove,
)
from tests.vision import recipe

STATIC: dict[str, Any] = {"method": "rtn", "activations": {"range": "minmax"}}
SMOOTH: dict[str, Any] = {"method": "smoothquant", "activations": {"range": "minmax"}}
KINDS = {"convnext": SMOOTH, "efficientnet": STATIC, "mobilenet_v2": STATIC, "swin": SMOOTH}
MERGED = "swin.encoder.layers.0.downsample.reduction"
SHIFTED = "swin.encoder.layers.0.blocks.1.attention"
POINTWISE = "convnext.encoder.stages.1.layers.0"
STRIDED = "mobilenet_v2.layer.0.conv_3x3.convolution"
ADDED = "mobilenet_v2.layer.1.residual"
EFFICIENT = "efficientnet.encoder.blocks"
EXPANDED = f"{EFFICIENT}.2.expansion.expand_bn"


Made = Callable[[str], Run]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """made(architecture) -> its run, made at the first call."""

    @cache
    def call(kind: str) -> Run:
        root = tmp_path_factory.mktemp(kind)
        return make(root / "run", recipe(root, kind, KINDS[kind]))

    return call


@pytest.fixture(scope="module")
def proven(made: Made) -> Callable[[str], Materials]:
    """proven(architecture) -> materials of its run that hold at every hop."""
    return cache(lambda kind: prove(materials(made(kind))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_correct_run_passes_in_both_dialects(
    made: Made, proven: Callable[[str], Materials], tmp_path: Path, kind: str
) -> None:
    target = TensorRTTarget(runtime="tensorrt-rtx", float="fp32")
    other = for_target(made(kind), tmp_path / "rtx", target)
    prove(lowered_again(proven(kind), other), "lower")


INTEGERS = {
    "convnext": {"MatMulIntegerToFloat": 6},
    # in float: two gates of each of five blocks, and the top convolution
    "efficientnet": {
        "QLinearConv": 14,
        "QLinearAdd": 2,
        "Conv": 2 * 5 + 1,
        "Pad": 0,
        "QuickGelu": 15,
    },
    "mobilenet_v2": {"QLinearConv": 52, "QLinearAdd": 10, "Conv": 0, "Clip": 0, "Pad": 0},
    "swin": {"MatMulIntegerToFloat": 3 * 6 + 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_onnx_runtime_runs_every_quantized_module_in_integers(
    made: Made, tmp_path: Path, kind: str
) -> None:
    session(made(kind).folder("model") / "model.onnx", optimized=tmp_path / "optimized.onnx")
    kernels = [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert {name: kernels.count(name) for name in INTEGERS[kind]} == INTEGERS[kind]


def test_openvino_runs_every_quantized_convolution_in_integers(
    made: Made, proven: Callable[[str], Materials], tmp_path: Path
) -> None:
    """The build stage refuses modules in higher precision."""
    run = for_openvino(made("efficientnet"), tmp_path / "openvino")
    other = lowered_again(proven("efficientnet"), run)
    entries = [ledger.run_hop(hop, other) for hop in hops_from(other, "lower")]
    assert integer_sums.misjudged(e for e in entries if e.ok is not None) == []


def test_what_stays_float_is_said_with_the_reason(made: Made) -> None:
    notes = {n.module: n.why for n in materials(made("convnext")).state.notes}
    listed = "not among the layers that model/architectures/families.py lists"
    assert notes[f"{POINTWISE}.dwconv"] == listed
    assert notes["convnext.encoder.stages.1.downsampling_layer.1"].startswith("outside the blocks")


def test_gates_on_channels_stay_float_and_what_they_multiply_is_quantized(made: Made) -> None:
    found = materials(made("efficientnet"))
    listed = "not among the layers that model/architectures/families.py lists"
    whys = {n.module: n.why for n in found.state.notes if ".squeeze_excite." in n.module}
    assert len(whys) == 2 * 5
    assert set(whys.values()) == {listed}
    assert f"{EFFICIENT}.0.projection.project_conv" in found.state.modules


def test_what_sparsity_prunes_are_the_linear_layers_of_unequal_blocks(made: Made) -> None:
    found, sparsity = materials(made("swin")), Sparsity(method="magnitude", pattern="2:4")
    expected = {f"{name}.weight" for name in found.state.modules}
    assert set(sparsity_laws.list_parameters(found, sparsity)) == expected


def sides_swapped(convolution: str) -> Callable[[onnx.GraphProto], None]:
    """Exchange the padding above and on the left with that below and on the right."""

    def swap(graph: onnx.GraphProto) -> None:
        node = next(n for n in graph.node if n.op_type == "Conv" and n.name.startswith(convolution))
        (pads,) = (a for a in node.attribute if a.name == "pads")
        before, behind = list(pads.ints[:2]), list(pads.ints[2:])
        assert before != behind
        pads.CopyFrom(helper.make_attribute("pads", behind + before))

    return swap


def swish_of_what_was_not_quantized(graph: onnx.GraphProto) -> None:
    """Read the convolution's output before it is quantized."""
    coded = f"{EXPANDED}/input"
    (swish,) = (n for n in graph.node if coded in n.input)
    quantizer = next(n for n in graph.node if f"{coded}_codes" in n.output)
    assert swish.op_type == "QuickGelu"
    swish.input[0] = quantizer.input[0]


def slope_of_gelu(graph: onnx.GraphProto) -> None:
    """Use QuickGelu's default slope."""
    swish = next(n for n in graph.node if n.op_type == "QuickGelu")
    swish.attribute[0].f = 1.702


def shifted_once_more(graph: onnx.GraphProto) -> None:
    """Leave positions shifted behind a shifted window."""
    joins = [n for n in graph.node if n.op_type == "Concat" and n.name.startswith("swin.encoder")]
    back = next(n for n in joins if "blocks.1" in n.name and len(n.input) == 2)
    first, second = back.input
    back.input[:] = [second, first]


# fault: (architecture, hop it is planted at, edit)
MUTANTS: dict[str, tuple[str, str, m.Edit]] = {
    "the scale of one channel behind merged patches": (
        "swin", "compress", m.weight(MERGED, m.one_channel_doubled)),
    "windows that are not shifted as they were": (
        "swin", "export", m.edit_onnx("graph", shifted_once_more)),
    "the zero point of merged patches moved by one": (
        "swin", "lower", m.values("model", f"{MERGED}/input_zero_point", lambda z: z + 1)),
    "the scale of one channel behind GELU": (
        "convnext", "compress", m.weight(f"{POINTWISE}.pwconv2", m.one_channel_doubled)),
    "the zero point behind GELU moved by one": (
        "convnext", "lower",
        m.values("model", f"{POINTWISE}.pwconv2/input_zero_point", lambda z: z + 1)),
    "one channel of the scale of a layer doubled": (
        "convnext", "export", m.values("graph", f"{POINTWISE}.layer_scale_parameter", one_doubled)),
    "one channel of a depthwise convolution, which is float, doubled": (
        "convnext", "lower", m.values("model", f"{POINTWISE}.dwconv.bias", one_doubled)),
    "padding on the other sides in the float graph": (
        "mobilenet_v2", "export", m.edit_onnx("graph", sides_swapped(STRIDED))),
    "padding on the other sides before a depthwise convolution of five rows": (
        "efficientnet", "export",
        m.edit_onnx("graph", sides_swapped(f"{EFFICIENT}.2.depthwise_conv"))),
    "a range twice too wide in front of swish": (
        "efficientnet", "compress", m.site(EXPANDED, lambda r: Range(2 * r.low, 2 * r.high))),
    "the zero point in front of swish moved by one": (
        "efficientnet", "lower",
        m.values("model", f"{EXPANDED}/input_zero_point", lambda z: z + 1)),
    "swish reads floats": (
        "efficientnet", "lower", m.edit_onnx("model", swish_of_what_was_not_quantized)),
    "swish with another slope": ("efficientnet", "lower", m.edit_onnx("model", slope_of_gelu)),
    "the gate of one channel, which is float, moved": (
        "efficientnet", "lower",
        m.values("model", f"{EFFICIENT}.2.squeeze_excite.expand.bias", one_doubled)),
    "the zero point in front of the top convolution, which is float, moved by one": (
        "efficientnet", "lower",
        m.values("model", f"{EFFICIENT}.4.result/input_zero_point", lambda z: z + 1)),
    "the zero point in front of a residual add moved by one": (
        "mobilenet_v2", "lower", m.values("model", f"{ADDED}/input_zero_point", lambda z: z + 1)),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "hop", "edit"), MUTANTS.values(), ids=MUTANTS.keys())
def test_a_fault_is_caught_at_its_hop(
    proven: Callable[[str], Materials], tmp_path: Path, kind: str, hop: str, edit: m.Edit
) -> None:
    assert first_refused(proven(kind), tmp_path, edit) == hop
