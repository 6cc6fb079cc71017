"""The first bad module is found in few runs, under the checkpoint's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.validate.ledger import bisect, hops
from optimizer.validate.ledger.entry import LedgerEntry
from tests.validate.ledger.faults import mutations as m
from tests.validate.ledger.faults.mutations import OUTPUT, QUERY
from tests.validate.runs import Run


@pytest.mark.parametrize("place", [0, 1, 30, 62, 63])
def test_the_search_asks_logarithmically_often(place: int) -> None:
    asked = []

    def bad(part: Sequence[int]) -> bool:
        asked.append(len(part))
        return any(i in (place, 63) for i in part)

    assert bisect.find_first_bad(range(64), bad) == place
    assert len(asked) <= 7


def test_nothing_bad_is_nothing_found() -> None:
    assert bisect.find_first_bad(range(10), lambda part: False) is None
    assert bisect.find_first_bad([], lambda part: True) is None


def bad(entry: LedgerEntry) -> list[str]:
    return [p.module for p in entry.pieces if not p.fine]


@pytest.mark.parametrize("module", [QUERY, OUTPUT, "encoder.layer.1.attention.output.dense"])
def test_a_lowered_scale_doubled_is_named_and_no_other_module(
    runs: dict[str, Run], tmp_path: Path, module: str
) -> None:
    run = runs["static"].copy(tmp_path)
    m.values("model", f"{module}.weight_scale", lambda s: 2 * s)(run)
    assert bad(hops.lower(run.materials())) == [module]


def test_of_two_faults_both_are_named(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["w4"].copy(tmp_path)
    for module in (OUTPUT, QUERY):
        m.values("model", f"{module}.weight_scale", lambda s: 2 * s)(run)
    assert bad(hops.lower(run.materials())) == [QUERY, OUTPUT]


def test_a_fault_between_modules_is_found_before_the_modules_that_read_it(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    """The fault is in a LayerNorm after layer 0, which layer 1's attention and its residual
    read."""
    run = runs["static"].copy(tmp_path)
    name = "encoder.layer.0.output.LayerNorm.weight"
    m.values("graph", name, lambda w: 1.1 * w)(run)
    layer = "encoder.layer.1.attention.self"
    inputs = [f"{layer}.{part}:input" for part in ("query", "key", "value")]
    assert bad(hops.export(run.materials()))[:3] == inputs


def test_the_module_whose_compression_breaks_the_output_is_named(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    run = runs["w8"].copy(tmp_path)
    module = "encoder.layer.0.intermediate.dense"
    m.weight(module, lambda q: replace(q, integers=q.integers.flip(0)))(run)
    assert bisect.find_in_torch(run.materials(), limit=0.1) == module
    assert bisect.find_in_torch(runs["w8"].materials(), limit=0.1) is None


def test_where_no_module_passes_it_what_no_module_reads_is_said_to(runs: dict[str, Run]) -> None:
    said = bisect.describe_first_excess(runs["w8"].materials(), limit=0.1)
    assert "residual adds" in said
    assert "None" not in said


def test_a_state_over_its_budget_names_the_module_that_passes_it(runs: dict[str, Run]) -> None:
    run = runs["w4"]
    inner = run.section.validate_.model_copy(update={"quantization_budget": 0.05})
    section = run.section.model_copy(update={"validate_": inner})
    entry = hops.compress(replace(run, section=section).materials())
    assert entry.ok is False
    assert "passed at encoder.layer." in entry.problems[0]
