"""Integer products are exact on processors where ONNX Runtime saturates by default."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optimizer.harness.runtimes.ort import exact_integers
from optimizer.harness.runtimes.ort.run import OrtRunner
from tests.harness.runtimes.extreme_products import EXACT, FORMS, X, write


@pytest.mark.parametrize("form", FORMS)
def test_integer_products_are_exact_on_this_processor(form: str, tmp_path: Path) -> None:
    with OrtRunner(write(form, tmp_path / "m.onnx"), threads=1) as runner:
        np.testing.assert_array_equal(runner.infer({"x": X})["y"], EXACT)


def test_the_product_that_is_asked_is_the_one_described() -> None:
    (node,) = onnx.load_model_from_string(exact_integers.PRODUCT).graph.node
    assert (node.op_type, list(node.input)) == ("MatMulInteger", ["a", "b"])
    onnx.checker.check_model(exact_integers.PRODUCT, full_check=True)


def test_the_setting_is_made_where_products_saturate_and_only_there(tmp_path: Path) -> None:
    """EXACT is not set elsewhere, where it would slow a forward pass down by half."""
    import onnxruntime

    name, value = exact_integers.EXACT
    with OrtRunner(write("static", tmp_path / "m.onnx"), threads=1) as runner:
        needed = saturates(onnxruntime, tmp_path)
        options = runner._session.get_session_options()
        if needed:
            assert options.get_session_config_entry(name) == value
        else:
            with pytest.raises(RuntimeError, match="does not have configuration"):
                options.get_session_config_entry(name)
    assert exact_integers.list_settings(onnxruntime) == (((name, value),) if needed else ())


def saturates(ort: Any, folder: Path) -> bool:
    """Return True if the graph has wrong sums with default session options."""
    options = ort.SessionOptions()
    session = ort.InferenceSession(write("dynamic", folder / "d.onnx"), options)
    return not np.array_equal(session.run(None, {"x": X})[0], EXACT)


RUN = """
import sys
from pathlib import Path
from typing import Any
import numpy as np
from optimizer.harness.runtimes.ort.run import OrtRunner
with OrtRunner(Path(sys.argv[1]), threads=1) as runner:
    np.save(sys.argv[3], runner.infer({"x": np.load(sys.argv[2])})["y"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_they_are_exact_on_a_processor_with_avx2_and_without_vnni(
    form: str, tmp_path: Path
) -> None:
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("needs an emulator of processors: apt install qemu-user")
    model, x, y = write(form, tmp_path / "m.onnx"), tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(x, X)
    command = [emulator, "-cpu", "Haswell", sys.executable, "-c", RUN, *map(str, (model, x, y))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert y.is_file(), done.stderr[-2000:]
    np.testing.assert_array_equal(np.load(y), EXACT)


def test_a_constant_that_two_products_read_as_int8_opens_and_is_exact(tmp_path: Path) -> None:
    """ONNX Runtime cannot fold it beside EXACT, and names two tensors alike."""
    import onnxruntime

    rows, width, step = 4, 32, np.float16(2**-6)  # integers beyond 64 are moved to uint8
    weights = [np.full((width, width), value, np.int8) for value in (127, -127)]
    table = (np.arange(rows * width) % 7).astype(np.float16).reshape(rows, width)
    gain = np.linspace(0.2, 1, width).astype(np.float16)
    constants = {
        "table": table,
        "gain": gain,
        "step": step,
        **{f"w{i}": w for i, w in enumerate(weights)},
    }
    nodes = [
        helper.make_node("LayerNormalization", ["table", "gain"], ["normed"]),
        helper.make_node(
            "QuantizeLinear", ["normed", "step"], ["q"], output_dtype=TensorProto.INT8
        ),
        helper.make_node("DequantizeLinear", ["q", "step"], ["d"]),
    ]
    for i in (0, 1):
        nodes.append(helper.make_node("DequantizeLinear", [f"w{i}", "step"], [f"f{i}"]))
        nodes.append(helper.make_node("MatMul", ["d", f"f{i}"], [f"p{i}"]))
        nodes.append(helper.make_node("Add", [f"p{i}", "x"], [f"y{i}"]))
    shape = (TensorProto.FLOAT16, [rows, width])
    graph = helper.make_graph(
        nodes,
        "two_products",
        [helper.make_tensor_value_info("x", *shape)],
        [helper.make_tensor_value_info(f"y{i}", *shape) for i in (0, 1)],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    with OrtRunner(tmp_path / "m.onnx", threads=1) as runner:
        answers = runner.infer({"x": np.zeros((rows, width), np.float16)})
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", options)
    reference = session.run(None, {"x": np.zeros((rows, width), np.float16)})  # float products
    assert np.abs(reference).max() > 0.5
    for i, y in enumerate(reference):
        np.testing.assert_allclose(answers[f"y{i}"], y, rtol=2**-9)
