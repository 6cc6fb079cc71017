"""Integer products are exact on every processor, also where ONNX Runtime by default saturates."""

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

WIDTH, COLUMNS = 64, 32
WEIGHTS = np.random.default_rng(0).choice(np.array([-127, 127, 101], np.int8), (WIDTH, COLUMNS))
X = np.linspace(200, 255, 8 * WIDTH, dtype=np.float32).round().reshape(8, WIDTH)
X[:, 0] = 255  # so that a range found at run time, 0 to 255, has the scale 1 as well
EXACT = X.astype(np.int64) @ WEIGHTS.astype(np.int64)  # far beyond what 16 bits hold in a pair


def static() -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """Q/DQ around a MatMul."""
    node = helper.make_node
    nodes = [
        node("QuantizeLinear", ["x", "one", "zero"], ["xq"]),
        node("DequantizeLinear", ["xq", "one", "zero"], ["xd"]),
        node("DequantizeLinear", ["w", "one", "signed_zero"], ["wd"]),
        node("MatMul", ["xd", "wd"], ["y"]),
    ]
    constants = {"one": np.float32(1), "zero": np.uint8(0), "signed_zero": np.int8(0)}
    return nodes, constants


def dynamic() -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """The range found at run time, MatMulInteger."""
    node = helper.make_node
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["xq", "scale", "zero"]),
        node("MatMulInteger", ["xq", "w", "zero", "signed_zero"], ["sums"]),
        node("Cast", ["sums"], ["as_float"], to=TensorProto.FLOAT),
        node("Mul", ["as_float", "scale"], ["y"]),
    ]
    return nodes, {"signed_zero": np.int8(0)}


FORMS = {"static": static, "dynamic": dynamic}


def write(form: str, path: Path) -> Path:
    nodes, constants = FORMS[form]()
    arrays = {name: np.asarray(value) for name, value in constants.items()} | {"w": WEIGHTS}
    shapes = {"x": ["rows", WIDTH], "y": ["rows", COLUMNS]}
    values = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()}
    initializers = [numpy_helper.from_array(a, n) for n, a in arrays.items()]
    graph = helper.make_graph(nodes, form, [values["x"]], [values["y"]], initializers)
    opset = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_integer_products_are_exact_on_this_processor(form: str, tmp_path: Path) -> None:
    with OrtRunner(write(form, tmp_path / "m.onnx"), threads=1) as runner:
        np.testing.assert_array_equal(runner.infer({"x": X})["y"], EXACT)


def test_the_product_that_is_asked_is_the_one_described() -> None:
    (node,) = onnx.load_model_from_string(exact_integers.PRODUCT).graph.node
    assert (node.op_type, list(node.input)) == ("MatMulInteger", ["a", "b"])
    onnx.checker.check_model(exact_integers.PRODUCT, full_check=True)


def test_the_setting_is_made_where_products_saturate_and_only_there(tmp_path: Path) -> None:
    """Elsewhere it makes a forward pass slower by half."""
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
    assert exact_integers.settings(onnxruntime) == (((name, value),) if needed else ())


def saturates(ort: Any, folder: Path) -> bool:
    """Whether the graph gives wrong sums without any setting of ours."""
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
