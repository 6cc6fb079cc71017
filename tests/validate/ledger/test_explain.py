"""`optimize explain` tells fault from rounding, and names the module and the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.foundation.errors import InputError
from optimizer.validate.ledger import explain
from optimizer.validate.ledger.breach import BUDGET, CORRECT_RUNS
from optimizer.validate.ledger.distance import Distance
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.limits.spread import Spread
from optimizer.validate.ledger.pieces.pieces import Element, JudgedPiece

QUERY, OUTPUT = "encoder.layer.0.attention.self.query", "encoder.layer.1.output.dense"
COUNTS = {"elements": 640, "near_ties": 9, "flips": 2, "flips_allowed": 7, "wrong": 0}
QUANTIZER = JudgedPiece(QUERY, "quantizer", 0.1, "ties", counts=COUNTS)
ARITHMETIC = JudgedPiece(QUERY, "arithmetic", 0.5, "exact sums", (Element(4, 7, 1.5, 1.25, 0.5),))
BETWEEN = JudgedPiece(f"{OUTPUT}:input", "between", 0.9, "1e-06, the limit that correct runs set")
FAR = f"logits: an example is 0.1503 from torch, 0.1500 {CORRECT_RUNS}"


def entry(*pieces: JudgedPiece, ok: bool = False, problems: tuple[str, ...] = ()) -> LedgerEntry:
    """An entry of hop lower."""
    bad = tuple(p.problem for p in pieces if not p.fine)
    spread = Spread(4, 2.0**-24, {"logits": 0.04}, {"logits": 0.15}).as_dict({"logits": 0.1503})
    measured = Distance(0.1, 0.2, 0.9, 0.1503)
    made = LedgerEntry("lower", "torch", 0.15, measured, ok, "measured", (*problems, *bad))
    return replace(made, pieces=pieces, spread=spread)


def report(*entries: LedgerEntry) -> dict[str, Any]:
    row = {"module": QUERY, "scheme": "W8 channel", "note": "smoothed"}
    machine = {"cpu": "A processor", "cores": 2, "torch_capability": "AVX512", "threads": 1}
    document = {
        "target": "onnxruntime-cpu",
        "verdict": "fail",
        "machine": machine,
        "modules": [row],
        "ledger": [e.as_dict() for e in entries],
    }
    return dict(json.loads(json.dumps(document)))


def written(folder: Path, *entries: LedgerEntry) -> Path:
    (folder / "report.json").write_text(json.dumps(report(*entries)))
    return folder / "report.json"


def facts(folder: Path, *entries: LedgerEntry, module: str | None = None) -> dict[str, Any]:
    found = explain.explain(written(folder, *entries), module)
    assert explain.render_text(found)
    target: dict[str, Any] = found["targets"][0]
    return target


WRONG = replace(QUANTIZER, ratio=4.0, counts={**COUNTS, "wrong": 3}, worst=ARITHMETIC.worst)
SHIFTED = replace(QUANTIZER, ratio=1.5, counts={**COUNTS, "flips": 8})
KINDS = {
    "a wrong integer": (entry(WRONG, ARITHMETIC), "fault"),
    "too many flips": (entry(SHIFTED, ARITHMETIC), "fault"),
    "a product beyond its bound": (entry(QUANTIZER, replace(ARITHMETIC, ratio=2.0)), "fault"),
    "a product that is not a number": (
        entry(QUANTIZER, replace(ARITHMETIC, ratio=float("inf"))), "fault"),
    "a part between two modules": (entry(QUANTIZER, replace(BETWEEN, ratio=1.5)), "fault"),
    "a law": (entry(QUANTIZER, problems=(f"{QUERY}: left in float",)), "fault"),
    "a law and the distance": (entry(QUANTIZER, problems=("a law", FAR)), "fault"),
    "the distance alone": (entry(QUANTIZER, ARITHMETIC, BETWEEN, problems=(FAR,)), "rounding"),
    "the distance, no piece judged": (entry(problems=(FAR,)), "unclear"),
    "the budget": (entry(problems=(f"{BUDGET} 0.3 (relative L2); more",)), "budget"),
    "a graph that does not run": (
        LedgerEntry("lower", "", None, None, False, "not run", ("bad file",)), "unrun"),
}  # fmt: skip


@pytest.mark.parametrize("case", KINDS)
def test_a_fault_and_rounding_are_told_apart(case: str, tmp_path: Path) -> None:
    failed, kind = KINDS[case]
    finding = facts(tmp_path, entry(ok=True), failed)["finding"]
    assert (finding["hop"], finding["kind"]) == ("lower", kind)
    assert finding["because"]


def test_a_passing_report_has_no_fault_and_no_command(tmp_path: Path) -> None:
    good = entry(QUANTIZER, ok=True)
    assert facts(tmp_path, good)["finding"]["kind"] == "fine"
    assert explain.write_command(report(good), tmp_path) == ""


def test_the_modules_of_a_failed_hop_are_those_beyond_else_the_nearest(tmp_path: Path) -> None:
    beyond = facts(tmp_path, entry(WRONG, ARITHMETIC, replace(BETWEEN, ratio=1.5)))
    assert [m["module"] for m in beyond["modules"]] == [QUERY, OUTPUT]
    nearest = facts(tmp_path, entry(QUANTIZER, ARITHMETIC, BETWEEN, problems=(FAR,)))
    assert [m["module"] for m in nearest["modules"]] == [OUTPUT]


def test_the_text_has_both_pieces_the_elements_the_limits_and_the_processor(
    tmp_path: Path,
) -> None:
    text = explain.render_text(explain.explain(written(tmp_path, entry(WRONG, ARITHMETIC)), None))
    text = " ".join(text.split())
    for part in (
        "A processor, 2 cores; torch with AVX512 kernels on 1 thread",
        "3 of 640 integers wrong",
        "token 4, channel 7: 1.25 for 1.5, 0.25 off, 0.50 allowed",
        "4 correct runs, the median 0.04 apart",
        "0.1503 from torch, limit 0.1500*",
        "99% confidence",
        f"{QUERY} (W8 channel, smoothed)",
    ):
        assert part in text


def test_the_budget_is_of_all_examples_and_a_worse_one_is_named_beside_it(tmp_path: Path) -> None:
    spent = LedgerEntry("compress", "torch", 0.2, Distance(0.073, 0.6, 0.9, 0.31), True, "chosen")
    text = explain.render_text(explain.explain(written(tmp_path, spent), None))
    assert "all examples together 0.073 from torch, limit 0.20; chosen" in text
    assert "worst example is 0.31, which has no limit of its own" in text


def test_a_limit_that_accepts_zeros_is_printed_as_none(tmp_path: Path) -> None:
    wide = replace(entry(ok=True), tolerance=110.0)
    text = " ".join(explain.render_text(explain.explain(written(tmp_path, wide), None)).split())
    assert "no limit: correct runs lie up to 110 apart, an answer of zeros only 1*" in text


def test_a_named_module_is_shown_at_every_hop(tmp_path: Path) -> None:
    clean, failed = entry(QUANTIZER, ARITHMETIC, ok=True), entry(WRONG)
    (module,) = facts(tmp_path, clean, failed, module=QUERY)["modules"]
    assert [len(h["pieces"]) for h in module["hops"]] == [2, 1]


def test_the_command_names_the_module_furthest_beyond(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    found = report(entry(replace(ARITHMETIC, ratio=1.5), replace(BETWEEN, ratio=3.0)))
    assert explain.write_command(found, path) == f"optimize explain {path} {OUTPUT}"
    law = report(entry(QUANTIZER, problems=(f"{QUERY}: left in float",)))
    assert explain.write_command(law, path) == f"optimize explain {path} {QUERY}"
    far = report(entry(QUANTIZER, problems=(FAR,)))
    assert explain.write_command(far, path) == f"optimize explain {path}"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


def test_a_module_that_is_not_there_is_exit_2_with_the_closest(tmp_path: Path) -> None:
    result = run(str(written(tmp_path, entry(WRONG))), "encoder.layer.0.attention.slf.query")
    assert result.exit_code == 2
    assert f"The closest are {QUERY}" in result.stderr


def test_json_has_the_same_facts(tmp_path: Path) -> None:
    path = written(tmp_path, entry(WRONG, ARITHMETIC))
    result = run(str(path), "--json")
    assert json.loads(result.stdout) == explain.explain(path, None)
    assert "a fault, at hop lower" in run(str(tmp_path)).stdout


def test_a_bundles_reports_are_all_explained(tmp_path: Path) -> None:
    both = [report(entry(ok=True)), {**report(entry(WRONG)), "dropped": True}]
    (tmp_path / "report.json").write_text(json.dumps(both))
    found = explain.explain(tmp_path, QUERY)["targets"]
    assert [(t["finding"]["kind"], t["dropped"]) for t in found] == [
        ("fine", False),
        ("fault", True),
    ]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "cannot be read"),
        ("<!DOCTYPE html>", "begins '<!DOCTYPE html>'"),
        ('{"manifest_version": 1, "files": {}}', "a JSON object of manifest_version, files"),
        ("[]", "an empty list"),
        ("[3]", "JSON of type int"),
    ],
)
def test_a_file_that_is_not_a_report_is_exit_2_and_says_what_was_found(
    content: str | None, found: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    result = run(str(path))
    assert result.exit_code == 2
    assert found in result.stderr
    assert "Traceback" not in result.stderr


def test_a_folder_without_a_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a folder without report\.json"):
        explain.read(tmp_path)
