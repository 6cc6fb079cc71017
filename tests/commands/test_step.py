"""`optimize step`: what a pipeline tool reads is there however the run ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.commands import step, step_formats, step_outputs
from optimizer.commands.step_outputs import Ended
from optimizer.package.report.metrics import metrics
from tests.conftest import write_tiny_recipe
from tests.package.report.documents import document

FILES = {
    *("result.json", "verdict", "exit_code", "digest", "bundle"),
    *("metrics.json", "metrics.prom", "junit.xml", "summary.md"),
}
SAMPLE = re.compile(r'optimize\{target="[^"\n]*",metric="[^"\n]*"\} -?[0-9.e+-]+')


def optimize(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def gate(name: str, verdict: str, message: str = "") -> dict[str, str]:
    return {"name": name, "verdict": verdict, "message": message}


def report(*gates: dict[str, str]) -> dict[str, Any]:
    return {"target": "t", "verdict": "fail", "gates": list(gates)}


def test_the_command_offers_the_channels_that_there_are() -> None:
    assert tuple(step_outputs.CHANNELS) == step.CHANNELS


def test_every_file_is_written_and_values_have_no_lines_end(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<p>")
    ended = Ended(0, "pass", {"reports": []}, "done", Path("artifacts/x/1"), page, "ab" * 32)
    step_outputs.write(ended, tmp_path / "out")
    out = tmp_path / "out"
    assert {p.name for p in out.iterdir()} == FILES | {"report.html"}
    values = {name: (out / name).read_text() for name in step_outputs.VALUES}
    assert values == {
        "verdict": "pass",
        "exit_code": "0",
        "digest": "ab" * 32,
        "bundle": "artifacts/x/1",
    }


def test_what_an_earlier_run_left_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<p>")
    good = Ended(0, "pass", {}, "", Path("b"), tmp_path / "page.html", "ab")
    step_outputs.write(good, tmp_path / "out")
    step_outputs.write(Ended(2, "error", {"found": "x"}, ""), tmp_path / "out")
    assert not (tmp_path / "out" / "report.html").exists()
    assert (tmp_path / "out" / "digest").read_text() == ""


def test_a_gate_is_a_test_case_and_what_was_not_measured_is_skipped() -> None:
    gates = [
        gate("a", "pass"),
        gate("b", "fail", 'worse <by> "2" \x00'),
        gate("c", "inconclusive", "more"),
        gate("d", "not measured", "no GPU"),
    ]
    root = ElementTree.fromstring(step_formats.junit({"reports": [report(*gates)]}))
    (suite,) = root
    counts = [suite.attrib[k] for k in ("tests", "failures", "skipped", "errors")]
    assert counts == ["4", "2", "1", "0"]
    kinds = {case.attrib["name"]: [child.tag for child in case] for case in suite}
    assert kinds == {"a": [], "b": ["failure"], "c": ["failure"], "d": ["skipped"]}
    assert suite[1][0].attrib["message"] == 'worse <by> "2" \ufffd'


def test_an_error_is_one_test_case_with_an_error() -> None:
    text = step_formats.junit({"error": "RecipeError", "found": "no", "where": "x.yaml:1"})
    (case,) = ElementTree.fromstring(text).iter("testcase")
    (error,) = case
    assert (error.tag, error.attrib["type"]) == ("error", "RecipeError")
    assert "x.yaml:1" in str(error.text)


def test_metrics_are_finite_numbers_and_prometheus_reads_them() -> None:
    reports = document()["reports"]
    flat = metrics(reports)
    target = reports[0]["target"]
    assert flat[f"{target}/batch1_128/p50_ms"] == pytest.approx(
        reports[0]["speed"]["cells"][0]["systems"]["candidate"]["end_to_end"]["p50"]
    )
    assert flat[f"{target}/passed"] in (0.0, 1.0)
    assert json.loads(json.dumps(flat, allow_nan=False)) == flat
    lines = step_formats.prometheus(flat).splitlines()
    assert [line for line in lines[2:] if not SAMPLE.fullmatch(line)] == []
    assert len(lines) == len(flat) + 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, True, "1"])
def test_what_is_no_finite_number_is_no_metric(value: object) -> None:
    quality = {"metric": "accuracy", "candidate": {"value": value}}
    flat = metrics([{**report(), "quality": quality}])
    assert "t/accuracy" not in flat


def test_a_label_can_hold_any_text() -> None:
    line = step_formats.prometheus({'a"\\\nb/c': 1.0}).splitlines()[2]
    assert line == 'optimize{target="a\\"\\\\\\nb",metric="c"} 1.0'


def test_a_fence_in_the_text_does_not_end_the_fence() -> None:
    text = step_formats.markdown("pass", "", "a\n```\nb")
    assert text.count("````") == 2


def test_github_gets_outputs_and_a_summary_beside_what_is_there(tmp_path: Path) -> None:
    outputs, summary = tmp_path / "output", tmp_path / "summary"
    outputs.write_text("before=1\n")
    result = CliRunner().invoke(
        main,
        [
            *("step", str(tmp_path / "none.yaml"), "--outputs", str(tmp_path / "out")),
            *("--outputs-to", "github"),
        ],
        env={"GITHUB_OUTPUT": str(outputs), "GITHUB_STEP_SUMMARY": str(summary)},
    )
    assert result.exit_code == 2
    lines = outputs.read_text().splitlines()
    assert lines == ["before=1", "verdict=error", "exit_code=2", "digest=", "bundle="]
    assert "none.yaml" in summary.read_text()


def test_gitlab_gets_variables(tmp_path: Path) -> None:
    optimize("step", tmp_path / "none.yaml", "--outputs", tmp_path, "--outputs-to", "gitlab")
    lines = (tmp_path / "optimize.env").read_text().splitlines()
    assert lines[:2] == ["OPTIMIZE_VERDICT=error", "OPTIMIZE_EXIT_CODE=2"]


def test_a_wrong_recipe_leaves_every_file_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    result = optimize("--json", "step", tmp_path / "recipe.yaml", "--outputs", tmp_path / "out")
    assert result.exit_code == 2
    assert {p.name for p in (tmp_path / "out").iterdir()} == FILES
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert written == json.loads(result.stdout)


@pytest.mark.slow
def test_a_run_ends_in_the_same_files(tmp_path: Path, tiny_bert: Path) -> None:
    recipe = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    command = ["step", recipe, "--outputs", tmp_path / "out", "--store", tmp_path / "store"]
    result = optimize("--json", *command, "--artifacts", tmp_path / "artifacts")
    out = tmp_path / "out"
    verdict = (out / "verdict").read_text()
    assert result.exit_code == {"pass": 0, "fail": 3, "inconclusive": 4}[verdict]
    assert json.loads(result.stdout) == json.loads((out / "result.json").read_text())
    assert {p.name for p in out.iterdir()} == FILES | {"report.html"}
    manifest = json.loads((tmp_path / "artifacts/tiny/1/manifest.json").read_bytes())
    assert (out / "digest").read_text() == manifest["digest"]
    assert json.loads((out / "metrics.json").read_text())["onnxruntime-cpu/passed"] == 1.0
