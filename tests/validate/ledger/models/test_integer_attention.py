"""Attention that multiplies integers, in OpenVINO: correct and damaged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optimizer.foundation.state import Range
from optimizer.recipe.schema import OpenVinoTarget
from optimizer.validate.ledger import hops, ledger
from optimizer.validate.materials import Materials
from tests.harness.runtimes.openvino import integer_sums
from tests.validate.ledger.faults import mutations as m
from tests.validate.runs import Run, damaged, make, recipe

ATTENTION = "encoder.layer.1.attention.self"
OPERANDS = f"{ATTENTION}.operands"


@pytest.fixture(scope="module")
def clean(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Materials:
    root = tmp_path_factory.mktemp("integer_attention")
    quantize = {"method": "smoothquant", "activations": {"attention": "int8"}}
    made = recipe(str(tiny_bert), root, quantize, "sentence-embedding")
    target = OpenVinoTarget(runtime="openvino", threads=1)
    return make(root / "run", made.model_copy(update={"targets": (target,)})).materials()


def test_a_clean_run_holds_at_every_hop(clean: Materials) -> None:
    entries = [ledger.run_hop(hop, clean) for hop in ledger.list_hops(clean)]
    assert integer_sums.misjudged(entries) == []
    (engine,) = (e for e in entries if e.hop == "engine")
    judged = {p.module for p in engine.pieces if p.piece == "quantizer"}
    operands = ("query", "key", "value", "probabilities")
    assert {f"{OPERANDS}.{name}" for name in operands} <= judged
    assert clean.inspected["inspected"]["wider"] == []


def scale(operand: str) -> str:
    return f"{OPERANDS}.{operand}/input_scale"


def zero_point_moved(run: Run) -> None:
    m.values("model", f"{OPERANDS}.value/input_zero_point", lambda z: z + 1)(run)


def in_float(operand: str) -> m.Edit:
    """Read the float in front of the integers; no file records that."""

    def change(graph: m.onnx.GraphProto) -> None:
        quantizer = m.node(graph, f"{OPERANDS}.{operand}/input_codes")
        for node in graph.node:
            for i, name in enumerate(node.input):
                if name == f"{OPERANDS}.{operand}/input":
                    node.input[i] = quantizer.input[0]

    return m.edit_onnx("model", change)


FAULTS: dict[str, tuple[Callable[[Materials], object], str, m.Edit]] = {
    "the scales of queries and keys exchanged": (
        hops.lower, "query", m.swapped("model", scale("query"), scale("key"))),
    "probabilities in steps of 1/127": (
        hops.engine, "probabilities",
        m.values("model", scale("probabilities"), lambda s: np.float32(1 / 127))),
    "a zero point of values": (hops.engine, "value", zero_point_moved),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_an_operand_is_caught(fault: str, clean: Materials, tmp_path: Path) -> None:
    hop, operand, edit = FAULTS[fault]
    entry = ledger.run_hop(hop, damaged(clean, tmp_path, edit))
    assert entry.ok is False
    assert any(problem.startswith(f"{OPERANDS}.{operand}") for problem in entry.problems)


def test_an_operand_left_in_float_is_caught(clean: Materials, tmp_path: Path) -> None:
    entry = ledger.run_hop(hops.lower, damaged(clean, tmp_path, in_float("key")))
    assert entry.ok is False
    assert f"the integers of the output of {OPERANDS}.key are not read" in entry.problems[0]


def test_probabilities_in_another_range_than_0_to_1_are_caught(
    clean: Materials, tmp_path: Path
) -> None:
    name = f"{OPERANDS}.probabilities:input"
    state = replace(clean.state, ranges={**clean.state.ranges, name: Range(0.0, 2.0)})
    moved = copy.copy(clean)
    moved.__dict__ |= {"state": state}
    entry = ledger.run_hop(hops.compress, moved)
    assert any("its range is" in problem for problem in entry.problems)
