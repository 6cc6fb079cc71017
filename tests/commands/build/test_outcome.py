"""Summary at the end of a run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from optimizer import pipeline
from optimizer.commands.build.outcome import RunResult, finish
from optimizer.commands.bundle import look
from optimizer.harness.errors import BundleError
from optimizer.pipeline import Built
from optimizer.recipe.schema import Recipe
from optimizer.store import MADE_FROM, Step, Store
from tests.package.bundles import small_bundle


def test_a_failed_run_says_that_the_bundle_beside_it_is_not_its_own(tmp_path: Path) -> None:
    report = tmp_path / "1.failed" / "report.html"
    failed = RunResult(3, "fail", None, report, (), {}, "")
    assert "earlier" not in failed.text
    (tmp_path / "1").mkdir()
    assert f"{tmp_path / '1'} is the bundle of an earlier run" in failed.text


@pytest.mark.parametrize(
    ("gate", "verdict", "quality", "said"),
    [
        ("quality.accuracy", "inconclusive", {"needed": 1500, "examples": 600}, "add about 900 r"),
        ("quality.accuracy", "inconclusive", {"needed": None, "examples": 600}, "raise validate."),
        ("speed.must_beat_float", "inconclusive", {}, "with --remeasure"),
        ("quality.accuracy", "fail", {}, "docs/tutorial.md, section 5"),
        ("quality.accuracy", "pass", {}, ""),
    ],
)
def test_a_run_without_a_bundle_says_what_to_do_next(
    gate: str, verdict: str, quality: dict[str, object], said: str, tmp_path: Path
) -> None:
    report = {"gates": [{"name": gate, "verdict": verdict}], "quality": quality}
    ended = RunResult(4, "inconclusive", None, tmp_path / "r.html", (), {"reports": [report]}, "")
    assert ("Next:" in ended.text) is bool(said)
    assert said in ended.text


def validated(folder: Path, target: str, ok: bool) -> Step:
    """A finished validate step."""
    piece = {"module": "encoder.dense", "piece": "arithmetic", "ratio": 1.0 if ok else 3.0}
    entry = {
        "hop": "lower", "from": "torch", "ok": ok, "pieces": [piece],
        "problems": [] if ok else ["encoder.dense: its output is wrong"],
    }  # fmt: skip
    verdict = "pass" if ok else "fail"
    gate = {"name": "ledger", "verdict": verdict, "message": "hop lower: " + "word " * 30}
    report = {"target": target, "verdict": verdict, "gates": [gate], "ledger": [entry]}
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(report))
    (folder / MADE_FROM).write_text('{"files": {}}')
    return Step("validate", "key", folder)


def result(tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch) -> RunResult:
    """Of a recipe for two targets, the second of which fails and has this on_fail."""
    rtx = f"{{runtime: tensorrt-rtx, on_missing: defer, on_fail: {rule}}}"
    recipe = small_bundle.recipe(tmp_path / "recipe", (small_bundle.ORT, rtx))
    ok = validated(tmp_path / "a report", "onnxruntime-cpu", True)
    bad = validated(tmp_path / "b report", "tensorrt-rtx-cuda", False)
    packaged = None
    if rule == "drop":
        made = tmp_path / "packaged" / "bundle"
        made.mkdir(parents=True)
        manifest = {"manifest_version": 1, "engines": [], "files": {}}
        (made / "manifest.json").write_text(json.dumps(manifest))
        packaged = Step("package", "key", made.parent)

    def run(recipe: Recipe, store: Store) -> pipeline.Outcome:
        source = tmp_path / "source"
        source.mkdir()
        (source / "source.json").write_text("{}")
        store.log.append({"stage": "load", "path": str(source)})
        parts = zip(recipe.targets, (ok, bad), strict=True)
        built = tuple(Built(t, step, step, step) for t, step in parts)
        return pipeline.Outcome(recipe, built, packaged)

    monkeypatch.setattr(pipeline, "run", run)
    places = tmp_path / "store", tmp_path / "artifacts"
    return finish(recipe, *places, until="package", remeasure=False)


def test_a_dropped_target_is_exit_0_and_in_the_first_line_and_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = result(tmp_path, "drop", monkeypatch)
    assert (made.exit_code, made.bundle) == (0, tmp_path / "artifacts" / "tiny" / "1")
    first = made.text.splitlines()[0]
    (said,) = made.as_dict()["dropped"]
    assert (said["target"], said["gate"]) == ("tensorrt-rtx-cuda", "ledger")
    assert all(part in first for part in said.values())


def test_a_refused_one_is_exit_3_and_no_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = result(tmp_path, "refuse", monkeypatch)
    assert (made.exit_code, made.bundle, made.as_dict()["dropped"]) == (3, None, [])
    assert made.text.splitlines()[0] == "tiny"


def test_a_failed_ledger_ends_with_a_command_that_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = result(tmp_path, "refuse", monkeypatch)
    (line,) = [x.strip() for x in made.text.splitlines() if "optimize explain" in x]
    assert made.as_dict()["reports"][1]["gates"][0]["message"].endswith(line)
    _, _, report, module = shlex.split(line)
    assert (Path(report), module) == (tmp_path / "b report" / "report.json", "encoder.dense")
    assert "explain" not in made.as_dict()["reports"][0]["gates"][0]["message"]


def test_inspect_opens_no_file_outside_the_bundle(tmp_path: Path) -> None:
    made = small_bundle.make(tmp_path / "made") / "bundle"
    secret = {"size": 1, "sha256": "0" * 64, "measured": False}
    small_bundle.edited(made, lambda m: m["files"].update({"../secret": secret}))
    with pytest.raises(BundleError, match=r"'\.\./secret' leaves the bundle"):
        look.inspect(made)


def test_a_row_of_the_users_data_is_the_example_of_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunResult, "runnable", True)
    made = result(tmp_path, "drop", monkeypatch)
    (line,) = [x.strip() for x in made.text.splitlines() if "optimize predict" in x]
    *_, text = shlex.split(line)
    rows = (tmp_path / "recipe" / "evaluate.jsonl").read_text().splitlines()
    assert text in [json.loads(row)["text"] for row in rows]
    assert f"optimize serve {made.bundle}" in made.text
    assert f"optimize publish {made.bundle} oci-layout:" in made.text
