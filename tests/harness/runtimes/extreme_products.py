"""Products of int8 whose sums are exact only where no two of them are added in 16 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

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
