"""Rows of arrays: what fits the contract, and what is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.contract import Contract, TensorSpec
from optimizer.harness.inputs import tensors
from optimizer.harness.inputs.tensors import TensorRow

CONTRACT = Contract(
    task="tensors",
    inputs=(TensorSpec("x", "float32", ("batch", 2)), TensorSpec("ids", "int32", ("batch", 3))),
    outputs=(TensorSpec("y", "float32", ("batch", 1)),),
    input_kind="row",
)
RIGHT = {"x": [1, 2.5], "ids": [1, 2, 3]}


def test_rows_are_stacked_in_the_contract_s_types() -> None:
    rows = tensors.encode(CONTRACT, None, [RIGHT, RIGHT])
    batch = tensors.collate(CONTRACT, rows)
    assert {n: (a.dtype.name, a.shape) for n, a in batch.items()} == {
        "x": ("float32", (2, 2)),
        "ids": ("int32", (2, 3)),
    }


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"x": [1, 2]}, "missing input ids"),
        ({**RIGHT, "z": [1]}, "unknown input z"),
        ({**RIGHT, "x": [1, 2, 3]}, r"x has shape \[3\], not \[2\]"),
        ({**RIGHT, "x": [[1], [2, 3]]}, "lists have different lengths"),
        ({**RIGHT, "x": ["a", "b"]}, "not numbers"),
        ({**RIGHT, "x": [1, float("nan")]}, "NaN"),
        ({**RIGHT, "ids": [1, 2, 3.5]}, "not whole numbers"),
        ({**RIGHT, "ids": [1, 2, 2**40]}, "beyond int32"),
        ([1, 2], "missing input"),
    ],
)
def test_a_row_that_does_not_fit_has_a_problem(row: Any, words: str) -> None:
    (one,) = tensors.encode(CONTRACT, None, [row])
    assert re.search(words, one.problem)


def test_a_command_line_names_json_or_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "row.npz", x=np.ones(2), ids=np.arange(3))
    read = tensors.parse(str(tmp_path / "row.npz"))
    assert {n: a.tolist() for n, a in read.items()} == {"x": [1, 1], "ids": [0, 1, 2]}
    sent = tensors.read_received(tensors.encode_sent(str(tmp_path / "row.npz")).encode(), True)
    assert sent == tensors.parse('{"x": [1, 1], "ids": [0, 1, 2]}')
    with pytest.raises(Exception, match="is not JSON"):
        tensors.parse("x")


def test_equal_rows_are_one_key() -> None:
    rows = [
        TensorRow(RIGHT),
        TensorRow(dict(reversed(RIGHT.items()))),
        TensorRow({**RIGHT, "x": [1, 2.6]}),
    ]
    assert len(set(rows)) == 2
