"""The ledger on the real all-MiniLM-L6-v2: a clean run passes, and planted faults are caught."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from optimizer.validate.ledger import ledger
from tests.validate.ledger.faults import mutations as m
from tests.validate.ledger.faults.test_mutants import assert_caught
from tests.validate.runs import SCHEMES, Run, make, recipe

pytestmark = pytest.mark.slow
DEEP = "encoder.layer.4.intermediate.dense"


@pytest.fixture(scope="module")
def minilm(minilm_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("minilm")
    data = root / "data"
    data.mkdir()
    wanted = recipe(str(minilm_source), data, SCHEMES["static"], "sentence-embedding")
    return make(root, wanted)


def test_a_clean_run_raises_nothing(minilm: Run) -> None:
    entries = ledger.run(minilm.materials())
    assert [(e.hop, e.problems) for e in entries if e.ok is not True] == []


@pytest.mark.parametrize(
    ("planted", "edit"),
    [
        ("compress", m.weight(DEEP, m.one_channel_doubled)),
        ("export", m.epsilon("graph", 1e-5)),
        ("export", m.values("graph", "embeddings.word_embeddings.weight", m.row(20000))),
        ("lower", m.coding(2, lambda z: z - 1)),
        ("lower", m.left_in_float(DEEP)),
    ],
)
def test_a_planted_fault_is_caught_at_its_hop(
    minilm: Run, tmp_path: Path, planted: str, edit: m.Edit
) -> None:
    run = minilm.copy(tmp_path)
    edit(run)
    assert_caught(run.materials(), planted)


def test_the_pieces_name_the_module(minilm: Run, tmp_path: Path) -> None:
    run = minilm.copy(tmp_path)
    name = f"{DEEP}.weight_scale"
    m.values("model", name, lambda s: s * (1 + (np.arange(s.size) == 7) / 128))(run)
    entry = ledger.hops.lower(run.materials())
    assert [p.module for p in entry.pieces if not p.fine] == [DEEP]
