"""Refusals of TensorRT-RTX's parser and builder: the message names the module as the checkpoint
does, and the remedy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optimizer.harness.errors import BuildError, HarnessError, MachineError
from optimizer.harness.runtimes.trt.build import builder
from optimizer.harness.runtimes.trt.header import read_header
from optimizer.harness.runtimes.trt.products import import_product

pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")

INPUTS, OUTPUTS = 64, 16
DENSE = "encoder.layer.0.dense"


def linear(
    path: Path, *, groups: int = 2, zero_point: int | None = None, kind: int = TensorProto.INT4
) -> Path:
    """x @ dequantized integers, with the lowering's names of the two nodes."""
    codes = [1, 2] * (INPUTS * OUTPUTS // 2)
    held = [
        helper.make_tensor("codes", kind, [INPUTS, OUTPUTS], codes),
        numpy_helper.from_array(np.full((groups, OUTPUTS), 0.1, np.float32), "scale"),
    ]
    operands = ["codes", "scale"]
    if zero_point is not None:
        zeros = [zero_point] * (groups * OUTPUTS)
        held.append(helper.make_tensor("zero", kind, [groups, OUTPUTS], zeros))
        operands.append("zero")
    weight = helper.make_node(
        "DequantizeLinear",
        operands,
        ["w"],
        axis=0,
        block_size=INPUTS // groups,
        name=f"{DENSE}/weight",
    )
    product = helper.make_node("MatMul", ["x", "w"], ["y"], name=f"{DENSE}/MatMul")
    return save(path, [weight, product], held)


def save(path: Path, nodes: Sequence[Any], held: Sequence[Any]) -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", INPUTS])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", None])
    graph = helper.make_graph(nodes, "g", [x], [y], held)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.example", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def refusal(
    model: Path, kind: type[HarnessError] = BuildError, span: Any = (1, 2, 4), **options: Any
) -> str:
    engine = model.with_suffix(".engine")
    with pytest.raises(kind) as caught:
        builder.build(
            model, engine, shapes={"batch": span}, options=builder.BuildOptions(**options)
        )
    assert not engine.exists()
    return str(caught.value)


def test_the_same_model_without_a_fault_is_built(tmp_path: Path) -> None:
    model = linear(tmp_path / "m.onnx")
    made = builder.build(
        model, tmp_path / "e", shapes={"batch": (1, 2, 4)}, modules={DENSE: "codes"}
    )
    assert made["modules"][DENSE]["product"] == f"{DENSE}/MatMul"


def test_int4_with_a_zero_point_names_the_module(tmp_path: Path) -> None:
    message = refusal(linear(tmp_path / "m.onnx", zero_point=1))
    assert f"module {DENSE}: its DequantizeLinear" in message
    assert "symmetric: true" in message


def test_unsigned_codes_are_refused_with_the_dialect_that_serves(tmp_path: Path) -> None:
    message = refusal(linear(tmp_path / "m.onnx", zero_point=3, kind=TensorProto.UINT4))
    assert "signed int8 and int4" in message
    assert "trt_qdq" in message


def test_blocks_that_do_not_divide_the_inputs_name_the_module(tmp_path: Path) -> None:
    message = refusal(linear(tmp_path / "m.onnx", groups=3))
    assert f"module {DENSE}" in message
    assert "group_size" in message


def test_an_unsupported_operator_names_the_module(tmp_path: Path) -> None:
    node = helper.make_node(
        "NoSuchOp", ["x"], ["y"], name=f"{DENSE}/NoSuchOp", domain="com.example"
    )
    message = refusal(save(tmp_path / "m.onnx", [node], []))
    assert f"module {DENSE}: its NoSuchOp" in message
    assert "target onnxruntime" in message


def test_a_profile_the_model_cannot_run_at_is_refused(tmp_path: Path) -> None:
    fixed = numpy_helper.from_array(np.array([8, INPUTS]), "shape")  # eight rows and no other
    node = helper.make_node("Reshape", ["x", "shape"], ["y"], name=f"{DENSE}/Reshape")
    model = save(tmp_path / "m.onnx", [node], [fixed])
    assert "opt shape" in refusal(model)
    assert f"{DENSE}/Reshape" in refusal(model)


def test_a_profile_out_of_order_is_refused(tmp_path: Path) -> None:
    assert "ascending" in refusal(linear(tmp_path / "m.onnx"), span=(4, 2, 8))


def test_an_axis_without_a_range_is_refused_by_name(tmp_path: Path) -> None:
    model = linear(tmp_path / "m.onnx")
    with pytest.raises(BuildError, match=r"dynamic axis 'batch' of input x has no range"):
        builder.build(model, tmp_path / "e", shapes={"sequence": (1, 2, 4)})


@pytest.mark.parametrize("option", sorted(builder.PRODUCTS["tensorrt-rtx"].with_gpu))
def test_what_takes_a_gpu_to_build_says_so(option: str, tmp_path: Path) -> None:
    from optimizer.harness.runtimes.machine import describe_machine

    if describe_machine().gpu is not None:
        pytest.skip("there is a GPU")
    message = refusal(linear(tmp_path / "m.onnx"), MachineError, **{option: True})
    assert f"takes {option} only on a machine with a GPU" in message


def test_an_option_of_the_other_product_is_refused(tmp_path: Path) -> None:
    model = linear(tmp_path / "m.onnx")
    assert "use a target that supports it: tensorrt" in refusal(model, version_compatible=True)
    message = refusal(model, hardware_compatible="ampere_plus")
    assert "use a target that supports it: tensorrt" in message


def test_an_unknown_gpu_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    message = refusal(linear(tmp_path / "m.onnx"), compute_capabilities=("70",))
    assert "75, 80, 86, 89, 120, 121" in message


def test_every_profile_is_in_the_engine(tmp_path: Path) -> None:
    model = linear(tmp_path / "m.onnx")
    several = [{"batch": (1, 1, 1)}, {"batch": (2, 4, 8)}]
    made = builder.build(model, tmp_path / "e", shapes=several)
    assert [p["x"]["opt"][0] for p in made["profiles"]] == [1, 4]


@pytest.mark.parametrize("option", [{"workspace_gb": 0.5}, {"sparse_weights": True}])
def test_an_engine_is_built_with_the_options_it_has(option: dict[str, Any], tmp_path: Path) -> None:
    engine, options = tmp_path / "e", builder.BuildOptions(**option)
    made = builder.build(
        linear(tmp_path / "m.onnx"), engine, shapes={"batch": (1, 2, 4)}, options=options
    )
    assert read_header(engine).version == made["version"] == builder.version("tensorrt-rtx")


def test_options_reach_the_config_of_the_builder() -> None:
    trt = import_product("tensorrt-rtx")
    config = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_builder_config()
    builder.configure(trt, config, builder.BuildOptions())
    assert not config.get_flag(trt.BuilderFlag.SPARSE_WEIGHTS)
    builder.configure(trt, config, builder.BuildOptions(workspace_gb=0.5, sparse_weights=True))
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 1 << 29
    assert config.get_flag(trt.BuilderFlag.SPARSE_WEIGHTS)


LEFT_BEHIND = """
import gc, sys
from pathlib import Path
from optimizer.harness.runtimes.trt.build import builder
from optimizer.harness.runtimes.trt.products import import_product
from optimizer.harness.runtimes.trt.build.watch import logger

trt = import_product("tensorrt-rtx")
gc.disable()
cycle = [trt.Builder(logger(trt))]
cycle.append(cycle)
del cycle

def collect_in_messages(frame, event, _argument):
    if event == "call" and frame.f_code.co_name == "log":
        gc.collect()

sys.setprofile(collect_in_messages)
folder = Path(sys.argv[1])
builder.build(folder / "m.onnx", folder / "e", shapes={"batch": (1, 2, 4)})
"""


def test_a_builder_left_in_garbage_does_not_stop_the_next_build(tmp_path: Path) -> None:
    linear(tmp_path / "m.onnx")
    subprocess.run([sys.executable, "-c", LEFT_BEHIND, str(tmp_path)], check=True, timeout=120)
    assert (tmp_path / "e").is_file()


def test_a_product_that_is_not_installed_is_the_machines_fault(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r'pip install "tensorrt>=10\.3,<12"'):
        builder.build(tmp_path / "m.onnx", tmp_path / "e", shapes={}, product="tensorrt")
