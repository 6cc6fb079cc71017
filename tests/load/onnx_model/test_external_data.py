"""Files whose weights are external data: in several files, at offsets, and what they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from optimizer.load.onnx_model import stage
from optimizer.model.graph.needs import GraphShapes
from tests.load.onnx_model import exported
from tests.load.onnx_model.exported import weights
from tests.load.onnx_model.test_stage import compared, load, section

NODES = [
    helper.make_node("MatMul", ["x", "one.weight"], ["h"]),
    helper.make_node("Tanh", ["h"], ["t"]),
    helper.make_node("MatMul", ["t", "two.weight"], ["u"]),
    helper.make_node("MatMul", ["u", "three.weight"], ["y"]),
]
VALUES = {
    "one.weight": weights(8, 64),
    "two.weight": weights(64, 64, seed=1) / 8,
    "three.weight": weights(64, 4, seed=2) / 8,
}
PLACES = {
    "one.weight": ("a.data", 0),
    "two.weight": ("below/b.data", 4096),
    "three.weight": ("a.data", 8192),
}


def move_out(file: Path) -> None:
    """Move the weights of a file to PLACES."""
    model = onnx.load(file)
    for tensor in model.graph.initializer:
        name, offset = PLACES[tensor.name]
        data = file.parent / name
        data.parent.mkdir(exist_ok=True)
        data.touch()
        with data.open("r+b") as f:
            f.seek(offset)
            f.write(tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, name, offset, len(tensor.raw_data))
        tensor.ClearField("raw_data")
    onnx.save(model, file)


def test_weights_in_several_files_at_offsets_are_those_of_one_file(tmp_path: Path) -> None:
    file = exported.by_hand(tmp_path / "m.onnx", NODES, VALUES)
    move_out(file)
    assert file.stat().st_size < min(a.nbytes for a in VALUES.values())
    loaded = load(file, tmp_path / "out")
    rows: dict[str, Any] = {"x": np.asarray(weights(3, 8, seed=4))}
    assert compared(file, loaded, rows) < 1e-5
    copies = {str(f.relative_to(loaded)) for f in (loaded / "original").rglob("*") if f.is_file()}
    assert copies == {"original/model.onnx", "original/a.data", "original/below/b.data"}


def test_weights_beside_the_file_are_predicted_to_take_less_memory(tmp_path: Path) -> None:
    file = exported.by_hand(tmp_path / "m.onnx", NODES, VALUES)
    inside = stage.shapes(section(file))
    move_out(file)
    beside = stage.shapes(section(file))
    assert isinstance(inside, GraphShapes)
    assert isinstance(beside, GraphShapes)
    assert beside.opened < inside.opened
