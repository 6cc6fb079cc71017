"""In a graph that runs as it is written, 4-bit weights multiply float32 activations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optimizer.harness.runtimes.ort import exact_integers
from optimizer.harness.runtimes.ort.run import OrtRunner

WIDTH, COLUMNS, GROUP = 128, 64, 64


@pytest.mark.parametrize("exact", [True, False], ids=["exact integers asked for", "not asked for"])
def test_activations_are_not_quantized_on_any_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    settings = (exact_integers.EXACT,) if exact else ()
    monkeypatch.setattr(exact_integers, "list_settings", lambda _: settings)
    rng = np.random.default_rng(0)
    integers = rng.integers(-7, 8, (WIDTH, COLUMNS))
    scale = rng.uniform(0.5, 1.5, (WIDTH // GROUP, COLUMNS)).astype(np.float32)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale"], ["float"], axis=0, block_size=GROUP),
        helper.make_node("MatMul", ["x", "float"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", COLUMNS])],
        [
            helper.make_tensor("w", TensorProto.INT4, integers.shape, integers.ravel().tolist()),
            numpy_helper.from_array(scale, "scale"),
        ],
    )
    opset = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "p.onnx")
    x = rng.standard_normal((5, WIDTH)).astype(np.float32)
    weight = integers * np.repeat(scale, GROUP, axis=0)
    bound = WIDTH * np.finfo(np.float32).eps * (np.abs(x) @ np.abs(weight))  # Higham, (3.5)
    with OrtRunner(tmp_path / "p.onnx", threads=1, fuse=False) as runner:
        y = runner.infer({"x": x})["y"]
    assert (np.abs(y - x @ weight) <= bound).all()
