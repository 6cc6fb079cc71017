"""Clean runs raise nothing; a hop that cannot run here is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.foundation import errors
from optimizer.harness import errors as harness_errors
from optimizer.lower.onnx.graph_constants import read_input_quantizations
from optimizer.validate.ledger import hops, ledger
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.materials import Materials
from tests.conftest import write_tiny_bert
from tests.validate.ledger.faults.mutations import OUTPUT, values
from tests.validate.runs import SCHEMES, Run, for_tensorrt, hops_from, make, recipe

HOPS = [hop.__name__ for hop in ledger.HOPS]


def assert_clean(entries: list[LedgerEntry]) -> None:
    assert [e.hop for e in entries] == HOPS
    assert [(e.hop, e.problems) for e in entries if e.ok is not True] == []


def test_a_clean_run_raises_nothing(runs: dict[str, Run]) -> None:
    """Those of other schemes are proven by the fixture `proven` before faults are planted."""
    assert_clean(ledger.run(runs["smooth"].materials()))


def test_a_clean_classifier_raises_nothing(classifier_run: Run) -> None:
    assert_clean(ledger.run(classifier_run.materials()))


@pytest.mark.parametrize("seed", [11, 12])
def test_other_clean_models_raise_nothing(tmp_path: Path, seed: int) -> None:
    model = write_tiny_bert(tmp_path / "model", seed=seed)
    wanted = recipe(str(model), tmp_path, SCHEMES["static"], "sentence-embedding")
    assert_clean(ledger.run(make(tmp_path / "run", wanted).materials()))


def test_every_entry_is_plain_json_and_what_no_later_hop_reads_is_dropped(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    materials = runs["w8"].materials()
    entries = ledger.run(materials, tmp_path)
    assert_clean(entries)
    for entry in entries:
        json.dumps(entry.as_dict(), allow_nan=False)
        (file,) = tmp_path.glob(f"*-{entry.hop}.json")
        assert LedgerEntry.read(file) == entry
    known = set(dir(materials))
    for names in ledger.LAST_USED.values():
        assert set(names) <= known
        assert not set(names) & set(vars(materials))


def test_hops_that_passed_before_a_kill_are_not_run_again(
    runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hop that failed, or could not run here, is run again."""
    ran = []

    def hop(name: str, ok: bool | None) -> ledger.Hop:
        def run(_: Materials) -> LedgerEntry:
            ran.append(name)
            if name == "lower" and ran.count(name) == 1:
                raise KeyboardInterrupt
            return LedgerEntry(name, "", None, None, ok, "")

        run.__name__ = name
        return run

    made = (hop("load", True), hop("fold", None), hop("export", False), hop("lower", True))
    monkeypatch.setattr(ledger, "list_hops", lambda _: made)
    materials = runs["w8"].materials()
    with pytest.raises(KeyboardInterrupt):
        ledger.run(materials, tmp_path)
    entries = ledger.run(materials, tmp_path)
    assert ran == ["load", "fold", "export", "lower", "fold", "export", "lower"]
    assert [(e.hop, e.ok) for e in entries] == [
        ("load", True),
        ("fold", None),
        ("export", False),
        ("lower", True),
    ]


def test_only_what_graphs_are_cut_at_is_kept_of_a_trace(runs: dict[str, Run]) -> None:
    m = runs["w8"].materials()
    with_edges = [i for i, one in enumerate(m.simulated_traces) if one.inputs and one.outputs]
    assert with_edges == m.sampled
    assert len(with_edges) < len(m.batches)
    assert all(one.result for one in m.simulated_traces)


def test_a_deferred_engine_is_recorded_as_not_run_with_the_reason(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    run = runs["static"].copy(tmp_path)
    document = {"deferred": True, "why": "no tensorrt_rtx", "inspected": None}
    (run.folder("engine") / "engine.json").write_text(json.dumps(document))
    entry = ledger.run_hop(hops.engine, run.materials())
    assert entry.ok is None
    assert "no tensorrt_rtx" in entry.why


@pytest.mark.parametrize(
    ("scheme", "first"), [("static", "load"), ("smooth", "lower"), ("w4", "lower")]
)
def test_the_other_dialect_is_clean_and_its_engine_recorded_as_not_run(
    runs: dict[str, Run], tmp_path: Path, scheme: str, first: str
) -> None:
    """Hops before `lower` do not depend on the dialect."""
    materials = for_tensorrt(runs[scheme], tmp_path).materials()
    entries = [ledger.run_hop(hop, materials) for hop in hops_from(materials, first)]
    assert [(e.hop, e.problems) for e in entries if e.ok is False] == []
    engine = next(e for e in entries if e.hop == "engine")
    assert engine.ok is None
    assert "GPU" in engine.why


def test_a_dropped_offset_is_caught_at_the_lowering(runs: dict[str, Run], tmp_path: Path) -> None:
    run = for_tensorrt(runs["static"], tmp_path)
    found = read_input_quantizations(run.folder("model") / "model.onnx", [OUTPUT])
    assert found[OUTPUT].offset != 0, "the fault would change nothing"
    values("model", f"{OUTPUT}/input_offset", lambda x: 0 * x)(run)
    entry = ledger.run_hop(hops.lower, run.materials())
    assert any(OUTPUT in p for p in entry.problems)


def test_a_hop_that_cannot_be_carried_out_is_a_hop_that_failed(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    run = runs["w8"].copy(tmp_path)
    (run.folder("model") / "model.onnx").write_bytes(b"not a model")
    entries = ledger.run(run.materials())
    assert next(e.hop for e in entries if e.ok is False) == "lower"


@pytest.mark.parametrize("kind", [errors.MachineError, harness_errors.MachineError])
def test_what_this_machine_cannot_do_is_not_a_hop_that_failed(kind: type[Exception]) -> None:
    def hop(_materials: Materials) -> Any:
        raise kind("no kernels for it")

    with pytest.raises(kind, match="no kernels"):
        ledger.run_hop(hop, Materials.__new__(Materials))
