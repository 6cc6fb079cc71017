"""Each operator in torch gives the result of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper

from optimizer.model.graph.operators import OPERATORS

rng = np.random.default_rng(0)


def f(*shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


def i(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("Slice", [f(4, 5), i(-1, 1), i(-9, 5), i(0, 1), i(-2, 3)], {}),
    ("Reshape", [f(2, 3, 4), i(0, -1)], {}),
    ("Gather", [f(3, 4, 2), i(-1, 0)], {"axis": 1}),
    ("Gather", [f(3, 4), np.int64(2)], {"axis": 0}),
    ("GatherElements", [f(3, 4), np.array([[0, -1], [1, 2], [3, 0]])], {"axis": 1}),
    ("GatherND", [f(3, 4), np.array([[0, 1], [2, 3]])], {}),
    ("ScatterND", [f(3, 4), np.array([[2], [0]]), f(2, 4)], {}),
    ("Pad", [f(1, 2, 4, 4), i(0, 0, 1, 2, 0, 0, 0, 1), np.float32(3)], {}),
    ("Pad", [f(1, 2, 4, 4), i(0, 0, 1, 2, 0, 0, 3, 1)], {"mode": "reflect"}),
    ("Pad", [f(2, 3, 4), i(1, 0, 2, 3), np.float32(0), i(2, 0)], {}),
    ("Split", [f(2, 7)], {"axis": 1, "num_outputs": 3, "outputs": 3}),
    ("Unsqueeze", [f(2, 3), i(0, -1)], {}),
    ("Tile", [f(2, 3), i(2, 1)], {}),
    ("DepthToSpace", [f(1, 8, 2, 3)], {"blocksize": 2, "mode": "DCR"}),
    ("DepthToSpace", [f(1, 8, 2, 3)], {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", [f(1, 2, 4, 6)], {"blocksize": 2}),
    ("Trilu", [f(4, 4), np.int64(1)], {"upper": 0}),
    ("Flatten", [f(2, 3, 4)], {"axis": -1}),
    ("Range", [np.float32(1), np.float32(3), np.float32(0.5)], {}),
    ("CumSum", [f(3, 4), np.int64(1)], {"exclusive": 1, "reverse": 1}),
    ("TopK", [f(3, 6), i(2)], {"axis": 1, "largest": 0, "outputs": 2}),
    ("Mod", [f(3, 4), f(3, 4)], {"fmod": 1}),
    ("Mod", [i(-5, 5, 7), i(3, -3, 2)], {}),
    ("Div", [i(-5, 5, 7), i(3, -3, 2)], {}),
    ("Clip", [f(3, 4), np.float32(-0.5)], {}),
    ("PRelu", [f(2, 3, 4), f(3, 1)], {}),
    ("HardSigmoid", [f(9)], {"alpha": 0.3}),
    ("HardSwish", [3 * f(9)], {}),
    ("Gelu", [f(9)], {"approximate": "tanh"}),
    ("ReduceMean", [f(2, 3, 4), i(0, 2)], {"keepdims": 0}),
    ("ReduceL2", [f(2, 3, 4)], {}),
    ("ReduceProd", [f(2, 3), i(1)], {}),
    ("LayerNormalization", [f(2, 3, 4), f(3, 4), f(3, 4)], {"axis": 1, "epsilon": 1e-3}),
    ("GroupNormalization", [f(2, 4, 3, 3), f(4), f(4)], {"num_groups": 2}),
    ("InstanceNormalization", [f(2, 4, 3, 3), f(4), f(4)], {}),
    ("LpNormalization", [f(2, 4)], {"axis": 1}),
    ("Gemm", [f(4, 3), f(5, 4), f(1, 5)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("Conv", [f(1, 4, 7, 7), f(6, 2, 3, 3), f(6)], {"group": 2, "pads": [0, 1, 2, 1]}),
    ("Conv", [f(1, 4, 9), f(6, 4, 3)], {"strides": [2], "dilations": [2]}),
    ("ConvTranspose", [f(1, 4, 5, 5), f(4, 2, 3, 3)], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("MaxPool", [f(1, 2, 7, 7)], {"kernel_shape": [3, 3], "pads": [0, 1, 1, 0], "strides": [2, 2]}),
    ("AveragePool", [f(1, 2, 7, 7)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    ("Einsum", [f(2, 3, 4), f(2, 4, 5)], {"equation": "bij,bjk->bik"}),
    *(
        ("Resize", [f(1, 2, 4, 5), None, np.array([1, 1, 2, 1.6], np.float32)], attributes)
        for attributes in (
            {
                "mode": "nearest",
                "coordinate_transformation_mode": "asymmetric",
                "nearest_mode": "floor",
            },
            {"mode": "linear"},
            {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        )
    ),
]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[c[0] for c in CASES])
def test_an_operator_gives_the_result_of_onnx_runtime(case: int, tmp_path: Path) -> None:
    name, inputs, given = CASES[case]
    attributes = dict(given)
    outputs = [f"o{k}" for k in range(attributes.pop("outputs", 1))]
    names = [f"i{k}" if a is not None else "" for k, a in enumerate(inputs)]
    graph = helper.make_graph(
        [helper.make_node(name, names, outputs, **attributes)],
        "g",
        [],
        [onnx.ValueInfoProto(name=o) for o in outputs],
        [
            numpy_helper.from_array(np.asarray(a), n)
            for n, a in zip(names, inputs, strict=True)
            if n
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {})
    tensors = [None if a is None else torch.from_numpy(np.asarray(a)) for a in inputs]
    result = OPERATORS[name](tensors, attributes)
    results = result if isinstance(result, tuple) else (result,)
    for mine, theirs in zip(results, expected, strict=True):
        assert mine.numpy().dtype == theirs.dtype
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-5, atol=1e-5)
