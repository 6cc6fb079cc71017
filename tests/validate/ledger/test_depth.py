"""Tests of `validate.ledger`: the modules that are judged alone, and the words on the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.recipe.validate import Depth
from optimizer.validate.ledger import depth, ledger
from optimizer.validate.materials import Materials
from tests.validate.ledger.faults.mutations import OUTPUT, values
from tests.validate.runs import Run

BLOCKS = 20
MODULES = [f"layers.{i}.{kind}" for i in range(BLOCKS) for kind in ("q", "fc")] + ["head"]


def at_depth(run: Run, chosen: Depth) -> Materials:
    settings = run.section.validate_.model_copy(update={"ledger": chosen})
    section = run.section.model_copy(update={"validate_": settings})
    return replace(run, section=section).materials()


def test_a_sample_has_the_first_the_last_and_others_of_each_kind() -> None:
    some = depth.choose("sampled", MODULES, "a seed")
    assert some == [m for m in MODULES if m in some]
    for kind in ("q", "fc"):
        of_kind = [m for m in some if m.endswith(kind)]
        assert len(of_kind) == 2 + depth.AT_RANDOM
        assert {f"layers.0.{kind}", f"layers.{BLOCKS - 1}.{kind}"} < set(of_kind)
    assert "head" in some


def test_every_module_is_in_the_sample_of_some_run() -> None:
    assert {m for seed in range(200) for m in depth.choose("sampled", MODULES, str(seed))} == {
        *MODULES
    }


def test_the_probability_that_a_fault_escapes_is_the_share_of_modules_left_out() -> None:
    assert "1 of 4 modules" in depth.describe_left_out("sampled", 4, 1)
    assert "probability 75%" in depth.describe_left_out("sampled", 4, 1)
    assert depth.describe_left_out("full", 4, 4) == ""


@pytest.mark.parametrize(
    ("parameters", "expected"), [(depth.LARGE, "full"), (depth.LARGE + 1, "sampled")]
)
def test_the_default_follows_from_the_size(parameters: int, expected: Depth) -> None:
    assert depth.choose_depth(None, parameters) == expected
    assert depth.choose_depth("end_to_end", parameters) == "end_to_end"


@pytest.mark.parametrize("chosen", ["sampled", "end_to_end"])
def test_a_clean_run_passes_and_says_what_was_left_out(runs: dict[str, Run], chosen: Depth) -> None:
    entries = {e.hop: e for e in ledger.run(at_depth(runs["static"], chosen))}
    assert [(e.hop, e.problems) for e in entries.values() if e.ok is not True] == []
    for hop in ("export", "lower", "engine"):
        assert f"validate.ledger is {chosen}" in entries[hop].unproven
        assert bool(entries[hop].pieces) == (chosen == "sampled")
        assert not [p for p in entries[hop].pieces if p.piece == "between"]


def test_a_sampled_module_is_judged_alone(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["static"].copy(tmp_path)
    values("graph", f"{OUTPUT}.weight", lambda w: 1.001 * w)(run)
    found = ledger.run_hop(ledger.hops.export, at_depth(run, "sampled"))
    assert [p.module for p in found.pieces if not p.fine] == [OUTPUT]
