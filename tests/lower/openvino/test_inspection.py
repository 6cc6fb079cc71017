from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from optimizer.foundation.state import Activations
from optimizer.harness.runtimes.openvino.kernels import Kernel
from optimizer.harness.runtimes.openvino.run import OpenVinoRunner
from optimizer.lower.openvino.inspection import UNTOLD, inspect
from optimizer.recipe.schema import OpenVinoTarget
from tests.export.folders import Exported
from tests.lower.running import lowered
from tests.lower.states import PER_CHANNEL, SCHEMES, state_of

TARGET = OpenVinoTarget(runtime="openvino")


def kernels(model: Path) -> list[Kernel]:
    with OpenVinoRunner(model, threads=1) as runner:
        return runner.kernels()


@pytest.mark.parametrize(
    ("scheme", "activations", "kept"),
    [
        ("int8 channel", "tensor", "i8"),
        ("int8 tensor", "tensor", "i8"),
        ("int8 channel", None, "i8"),
        ("int8 group 32", None, "i8"),
        ("int4 group 32", None, "i4"),
    ],
)
def test_every_module_runs_in_a_kernel_of_integers(
    tiny: Exported, tmp_path: Path, scheme: str, activations: Activations, kept: str
) -> None:
    folder = lowered(tiny, state_of(tiny, SCHEMES[scheme], activations), TARGET, tmp_path)
    inspected = inspect(folder, kernels(folder / "model.onnx"))
    assert (inspected["eligible"], inspected["fused"], inspected["wider"]) == (12, 12, [])
    assert inspected["operators"] == {f"FullyConnected {kept}": 12}


def test_static_ranges_reach_the_products_as_unsigned_integers(
    tiny: Exported, tmp_path: Path
) -> None:
    """Products of int8 by int8 are emulated where a processor has no AMX."""
    folder = lowered(tiny, state_of(tiny, PER_CHANNEL, "tensor"), TARGET, tmp_path)
    products = [k for k in kernels(folder / "model.onnx") if k.kind == "FullyConnected"]
    assert {k.inputs[0] for k in products} == {"u8"}


def test_the_float_graph_has_none(tiny: Exported, tmp_path: Path) -> None:
    folder = lowered(tiny, state_of(tiny, PER_CHANNEL, "tensor"), TARGET, tmp_path)
    inspected = inspect(folder, kernels(tiny.graph / "model.onnx"))
    assert inspected["fused"] == 0
    assert inspected["wider"] == sorted(tiny.names.modules)
    assert all(why.startswith("its weight is f32") for why in inspected["why_wider"].values())


def test_a_module_that_multiplies_floats_is_wider_though_its_weight_is_packed(
    tiny: Exported, tmp_path: Path
) -> None:
    """As weights alone run: integers in memory, products in float."""
    (tmp_path / "static").mkdir()
    (tmp_path / "alone").mkdir()
    folder = lowered(tiny, state_of(tiny, PER_CHANNEL, "tensor"), TARGET, tmp_path / "static")
    alone = lowered(tiny, state_of(tiny, PER_CHANNEL), TARGET, tmp_path / "alone")
    inspected = inspect(folder, kernels(alone / "model.onnx"))
    assert inspected["fused"] == 0
    assert all(why.startswith("its input is f32") for why in inspected["why_wider"].values())


def test_what_no_kernel_names_is_not_taken_for_integers(tiny: Exported, tmp_path: Path) -> None:
    folder = lowered(tiny, state_of(tiny, PER_CHANNEL, "tensor"), TARGET, tmp_path)
    name = "encoder.layer.1.output.dense"
    others = [k for k in kernels(folder / "model.onnx") if not k.name.startswith(name)]
    assert inspect(folder, others)["why_wider"] == {name: UNTOLD}


def of_attention(kind: str, *inputs: str) -> Kernel:
    return Kernel("k", kind, "jit", ("encoder.layer.0.attention.self/MatMul_1",), inputs)


@pytest.mark.parametrize(
    ("own", "holds"),
    [
        ([of_attention("Subgraph", "i8", "i8", "f32", "i8")], True),
        ([of_attention("MatMul", "i8", "i8"), of_attention("MatMul", "u8", "i8")], True),
        ([of_attention("Subgraph", "i8", "i8", "f32", "f32")], False),
        ([of_attention("MatMul", "f32", "f32"), of_attention("MatMul", "u8", "i8")], False),
        ([], False),
    ],
)
def test_an_attention_that_multiplies_floats_is_wider(
    own: list[Kernel], holds: bool, tmp_path: Path
) -> None:
    (tmp_path / "lowering.json").write_text(
        '{"modules": {}, "summands": ["encoder.layer.0.attention.self.operands.key"]}'
    )
    onnx.save(onnx.helper.make_model(onnx.GraphProto(name="empty")), tmp_path / "model.onnx")
    wider = inspect(tmp_path, own)["wider"]
    assert wider == ([] if holds else ["encoder.layer.0.attention.self"])
