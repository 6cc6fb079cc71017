"""`optimize init` of an ONNX file splits the arrays of its inputs, and finds the labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from onnx import helper

from optimizer import checks
from optimizer.cli import main
from tests.load.onnx_model import exported


def init(folder: Path, arrays: dict[str, Any]) -> Result:
    nodes = [helper.make_node("MatMul", ["x", "W"], ["y"])]
    file = exported.by_hand(folder / "m.onnx", nodes, {"W": exported.weights(8, 4)})
    np.savez(folder / "rows.npz", **arrays)
    rows, out = folder / "rows.npz", folder / "my.yaml"
    return CliRunner().invoke(main, ["init", str(file), "--data", str(rows), "--out", str(out)])


def test_an_array_of_whole_numbers_beside_the_inputs_holds_the_labels(tmp_path: Path) -> None:
    result = init(tmp_path, {"x": exported.weights(120, 8), "kind": np.arange(120) % 4})
    assert result.exit_code == 0, result.output
    recipe, _ = checks.read(tmp_path / "my.yaml", (), fetch=False, early=True)
    assert recipe.validate_.data.columns == {"arrays": "*", "label": "kind"}
    assert recipe.validate_.metric == "accuracy"
    with np.load(tmp_path / "my-data" / "calibrate.npz") as calibration:
        assert calibration.files == ["x"]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": (120, 8), "z": (120, 3)}, "'z' is not an input"),
        ({"a": (120, 8), "b": (120, 8)}, "no array 'x'"),
    ],
)
def test_arrays_that_the_model_does_not_read_are_named(
    tmp_path: Path, arrays: dict[str, Any], words: str
) -> None:
    result = init(tmp_path, {n: exported.weights(*shape) for n, shape in arrays.items()})
    assert result.exit_code == 2
    assert words in result.output


def test_equal_rows_that_no_part_can_share_are_refused(tmp_path: Path) -> None:
    result = init(tmp_path, {"x": np.ones((100, 8), np.float32)})
    assert result.exit_code == 2
    assert "too many of 100 rows share an input" in result.output
