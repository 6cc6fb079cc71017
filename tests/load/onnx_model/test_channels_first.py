"""Files with channels last: their Transposes go, and their answers stay."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from optimizer.load.onnx_model import stage
from tests.load.onnx_model import exported
from tests.load.onnx_model.exported import weights
from tests.load.onnx_model.test_stage import compared, load, section

node = helper.make_node


def first(x: str, y: str) -> Any:
    return node("Transpose", [x], [y], perm=[0, 3, 1, 2])


def last(x: str, y: str) -> Any:
    return node("Transpose", [x], [y], perm=[0, 2, 3, 1])


def mobile(file: Path, height: int, width: int) -> Path:
    """A gated block of four channels as tf2onnx writes it, read by a pooled head."""
    nodes = [
        *(first("x", "x1"), node("Conv", ["x1", "w"], ["c1"]), last("c1", "c")),
        *(node("Add", ["c", "bias"], ["a"]), node("PRelu", ["a", "slope"], ["p"])),
        *(node("Pad", ["p", "sides"], ["d"]), first("d", "d1")),
        *(node("Conv", ["d1", "v"], ["e1"]), last("e1", "e")),
        node("ReduceMean", ["e", "hw"], ["m"], keepdims=1),
        *(first("m", "m1"), node("Conv", ["m1", "u"], ["g1"]), last("g1", "g")),
        *(node("Sigmoid", ["g"], ["s"]), node("Mul", ["e", "s"], ["z"])),
        *(node("Concat", ["z", "e"], ["j"], axis=-1), first("j", "j1")),
        *(node("Conv", ["j1", "t"], ["k1"]), last("k1", "k")),
        *(node("ReduceMax", ["k", "hw"], ["h"], keepdims=0), node("MatMul", ["h", "fc"], ["y"])),
    ]
    values = {"w": weights(4, 3, 1, 1), "v": weights(4, 4, 2, 2), "t": weights(4, 8, 1, 1)}
    values |= {"u": weights(4, 4, 1, 1)}
    values |= {"fc": weights(4, 2) / 10, "bias": weights(4), "slope": weights(1, 1, 4, seed=2)}
    values |= {"sides": np.array([0, 1, 0, 0, 0, 0, 2, 0]), "hw": np.array([1, 2])}
    return exported.by_hand(file, nodes, values, ("n", height, width, 3), opset=18)


@pytest.mark.parametrize(("height", "width"), [(5, 6), (4, 4)])
def test_transposes_around_convolutions_go_and_the_answers_stay(
    tmp_path: Path, height: int, width: int
) -> None:
    file = mobile(tmp_path / "m.onnx", height, width)
    operators = Counter(n.op for n in stage.open_file(section(file)).draft.nodes)
    assert operators["Transpose"] == 1  # of the input
    assert not operators["Add"] + operators["Pad"]  # both are in a convolution
    rows = {"x": weights(3, height, width, 3, seed=4)}
    assert compared(file, load(file, tmp_path / "out"), rows) < 1e-5


def test_a_tensor_that_others_read_channels_last_keeps_its_name(tmp_path: Path) -> None:
    nodes = [
        *(first("x", "x1"), node("Conv", ["x1", "w"], ["c1"]), last("c1", "c")),
        *(node("Relu", ["c"], ["r"]), node("MatMul", ["r", "fc"], ["y"])),
    ]
    values = {"w": weights(4, 3, 1, 1), "fc": weights(4, 2)}
    file = exported.by_hand(tmp_path / "m.onnx", nodes, values, ("n", 5, 6, 3), output=(1, 4))
    opened = stage.open_file(section(file))
    assert [name for n in opened.draft.nodes for name in n.outputs if n.op != "Identity"] == [
        *("x1", "c1", "c", "r", "y")
    ]


@pytest.mark.parametrize("kind", ["pad", "add"])
def test_an_operator_whose_axes_are_of_another_order_or_number_stays(
    tmp_path: Path, kind: str
) -> None:
    """A Pad that lists its axes, and a sum with a number of five axes. `load` compares its graph
    with the file's, without the fusions by which ONNX Runtime itself fails on such a Pad."""
    values = {"w": weights(4, 3, 1, 1), "v": weights(4, 4, 2, 2)}
    if kind == "pad":
        between = [node("Pad", ["c", "sides", "", "axes"], ["d"])]
        values |= {"sides": np.array([0, 1, 0, 0, 0, 0, 2, 0]), "axes": np.array([0, 2, 1, 3])}
    else:
        between = [node("Add", ["c", "one"], ["b"]), node("Reshape", ["b", "shape"], ["d"])]
        values |= {"one": weights(1, 1, 1, 1, 1), "shape": np.array([-1, 5, 6, 4])}
    nodes = [
        *(first("x", "x1"), node("Conv", ["x1", "w"], ["c1"]), last("c1", "c"), *between),
        *(first("d", "d1"), node("Conv", ["d1", "v"], ["e1"]), last("e1", "e")),
        *(node("Relu", ["e"], ["f"]), first("f", "f1"), node("Conv", ["f1", "v"], ["y"])),
    ]
    file = exported.by_hand(tmp_path / "m.onnx", nodes, values, ("n", 5, 6, 3), opset=18)
    load(file, tmp_path / "out")
