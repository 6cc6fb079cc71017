"""A graph of three modules' kernels: two products, an activation, and a node of no module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def write_products(file: Path) -> None:
    """Write it. Input x: (rows, 256) float32; modules layer.0.dense, layer.1 and none."""
    weight = numpy_helper.from_array(np.ones((256, 256), np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], "layer.0.dense/MatMul"),
        helper.make_node("MatMul", ["y", "w"], ["z"], "layer.0.dense/MatMul_1"),
        helper.make_node("Relu", ["z"], ["a"], "layer.1/Relu"),
        helper.make_node("Sin", ["a"], ["b"], "Sin"),
    ]
    x, b = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", 256]) for n in "xb")
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [b], [weight]),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    onnx.save(model, file)
