"""Write the ONNX graph that measures the rates of a machine: multiplications and bandwidths.

Its node NAME/... belongs to the module NAME of a profile (measure/roofline.py):
    float    MatMul of (SIDE, SIDE) float32
    int8     MatMulInteger of (SIDE, SIDE), uint8 with int8, which quantized products use
    add N    Add of float32 vectors, N bytes read and written; an Add before it, whose node has no
             module, brings the vectors into the caches that hold them
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE = 1024
OPERATIONS = 2 * SIDE**3
BYTES = (1 << 20, 1 << 23, 96 << 20)  # of an addition: its two inputs and its output; a choice
OPSET, IR = 21, 10
FLOAT, INT8 = "float", "int8"


def write(file: Path) -> dict[str, Any]:
    """Write a graph whose runs measure this machine's rates to `file`, and return {input: array} to
    run it with."""
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((SIDE, SIDE), np.float32)
    constants = [
        numpy_helper.from_array(weight, "w"),
        numpy_helper.from_array(draw.integers(-127, 128, (SIDE, SIDE), np.int8), "w8"),
        numpy_helper.from_array(np.uint8(128), "zero"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], f"{FLOAT}/MatMul"),
        helper.make_node("MatMulInteger", ["x8", "w8", "zero"], ["y8"], f"{INT8}/MatMulInteger"),
    ]
    arrays = {"x": weight, "x8": draw.integers(0, 256, (SIDE, SIDE), np.uint8)}
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [SIDE, SIDE]),
        helper.make_tensor_value_info("x8", TensorProto.UINT8, [SIDE, SIDE]),
    ]
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [SIDE, SIDE]),
        helper.make_tensor_value_info("y8", TensorProto.INT32, [SIDE, SIDE]),
    ]
    for size in BYTES:
        a, b, sum_, least = (f"{letter}{size}" for letter in "abcd")
        nodes += [
            helper.make_node("Add", [a, b], [sum_], f"Add{size}"),
            helper.make_node("Add", [sum_, b], [f"e{size}"], f"add {size}/Add"),
            helper.make_node("ReduceMax", [f"e{size}"], [least], f"ReduceMax{size}", keepdims=0),
        ]
        length = size // 3 // 4
        inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, [length]) for n in (a, b)]
        outputs.append(helper.make_tensor_value_info(least, TensorProto.FLOAT, []))
        arrays |= {n: np.ones(length, np.float32) for n in (a, b)}
    graph = helper.make_graph(nodes, "rates", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    onnx.save(model, file)
    return arrays
