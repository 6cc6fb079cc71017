"""`optimize step`: what a pipeline tool reads is there however the run ends."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.commands.build import request, step, step_formats, step_outputs
from optimizer.commands.build.step_outputs import Ended
from optimizer.foundation.errors import RecipeError
from optimizer.package.report.metrics import list_metrics
from tests import killing
from tests.conftest import write_tiny_recipe
from tests.package.report.documents import document

FILES = {
    *("result.json", "run_id", "verdict", "exit_code", "digest", "bundle"),
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
    step_outputs.write(ended, tmp_path / "out", "7")
    out = tmp_path / "out"
    assert {p.name for p in out.iterdir()} == FILES | {"report.html"}
    values = {name: (out / name).read_text() for name in step_outputs.VALUES}
    assert values == {
        "verdict": "pass",
        "exit_code": "0",
        "digest": "ab" * 32,
        "bundle": "artifacts/x/1",
    }


def earlier(tmp_path: Path) -> Path:
    """The outputs of a run that passed."""
    (tmp_path / "page.html").write_text("<p>")
    good = Ended(0, "pass", {}, "", Path("b"), tmp_path / "page.html", "ab")
    step_outputs.write(good, tmp_path / "out", "earlier")
    (tmp_path / "out" / "optimize.env").write_text("OPTIMIZE_VERDICT=pass\n")
    return tmp_path / "out"


def test_what_an_earlier_run_left_does_not_stay(tmp_path: Path) -> None:
    out = earlier(tmp_path)
    assert optimize("step", tmp_path / "none.yaml", "--outputs", out).exit_code == 2
    assert {p.name for p in out.iterdir()} == FILES
    assert (out / "digest").read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_killed_leaves_nothing_of_an_earlier_one(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = earlier(tmp_path)
    (out / "mine.txt").write_text("kept")
    monkeypatch.setattr(request, "carry_out", lambda _: os.kill(os.getpid(), number))
    words = ["step", str(tmp_path / "recipe.yaml"), "--outputs", str(out)]
    code = killing.wait(killing.start(lambda: main(words, standalone_mode=False)))
    assert code == (1 if number == signal.SIGINT else -number)
    assert [p.name for p in out.iterdir()] == ["mine.txt"]


def test_a_verdict_stands_beside_nothing_of_another_run_wherever_it_is_killed(
    tmp_path: Path,
) -> None:
    calls, finished = 0, False
    ended = Ended(3, "fail", {}, "", None, tmp_path / "page.html", "cd")

    def work() -> None:
        step_outputs.remove(tmp_path / "out")
        step_outputs.write(ended, tmp_path / "out", "later")

    while not finished:
        out = earlier(tmp_path)
        finished = killing.wait(killing.start(work, calls, below=str(out))) == 0
        here = {p.name: p.read_text() for p in out.iterdir() if not p.name.startswith(".")}
        if "verdict" in here and here["verdict"] != "pass":
            assert set(here) == FILES | {"report.html"}
            assert (here["verdict"], here["run_id"], here["exit_code"]) == ("fail", "later", "3")
        elif "verdict" in here:
            assert here["run_id"] == "earlier"
        calls += 2
    assert calls > 50


def test_a_run_has_the_name_that_the_pipeline_gives_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    optimize("step", tmp_path / "none.yaml", "--outputs", out, "--run-id", "job 7/2")
    assert (out / "run_id").read_text() == "job 7/2"
    assert json.loads((out / "result.json").read_text())["run_id"] == "job 7/2"


BREAKS = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\0")


@pytest.mark.parametrize("ending", BREAKS)
@pytest.mark.parametrize("channel", ["github", "gitlab"])
def test_a_value_of_two_lines_reaches_no_tool(ending: str, channel: str, tmp_path: Path) -> None:
    ended = Ended(3, "fail", {}, "", Path(f"a{ending}verdict=pass"))
    with pytest.raises(RecipeError, match="outputs of the step: bundle"):
        step_outputs.write(ended, tmp_path, "1")
    assert list(tmp_path.iterdir()) == []
    if ending == "\0":  # which no command line can hold
        return
    output = tmp_path / "github_output"
    words = ["step", tmp_path / "none.yaml", "--outputs", tmp_path, "--outputs-to", channel]
    words += ["--github-output", output, "--artifacts", f"a{ending}verdict=pass"]
    assert optimize(*words).exit_code == 2
    assert (tmp_path / "verdict").read_text() == "error"
    made = output if channel == "github" else tmp_path / "optimize.env"
    values = [line.partition("=")[2] for line in made.read_text().splitlines()]
    assert values == ["error", "2", "", ""]


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
    flat = list_metrics(reports)
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
    flat = list_metrics([{**report(), "quality": quality}])
    assert "t/accuracy" not in flat


def test_metrics_of_an_adapter_are_apart_from_those_of_a_set_of_like_name() -> None:
    first, second, third = ({"metric": "m", "candidate": {"value": v}} for v in (1.0, 2.0, 3.0))
    sections = {"quality": first, "also": {"adapter.sql": second}, "adapters": {"sql": third}}
    flat = list_metrics([{**report(), **sections}])
    assert [flat[f"t/{n}m"] for n in ("", "adapter.sql/", "adapter/sql/")] == [1.0, 2.0, 3.0]


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
    run_id = (tmp_path / "out" / "run_id").read_text()
    assert written == {**json.loads(result.stdout), "run_id": run_id}


@pytest.mark.slow
def test_a_run_ends_in_the_same_files(tmp_path: Path, tiny_bert: Path) -> None:
    recipe = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    command = ["step", recipe, "--outputs", tmp_path / "out", "--store", tmp_path / "store"]
    result = optimize("--json", *command, "--artifacts", tmp_path / "artifacts")
    out = tmp_path / "out"
    verdict = (out / "verdict").read_text()
    assert result.exit_code == {"pass": 0, "fail": 3, "inconclusive": 4}[verdict]
    run_id = (out / "run_id").read_text()
    written = json.loads((out / "result.json").read_text())
    assert written == {**json.loads(result.stdout), "run_id": run_id}
    assert {p.name for p in out.iterdir()} == FILES | {"report.html"}
    manifest = json.loads((tmp_path / "artifacts/tiny/1/manifest.json").read_bytes())
    assert (out / "digest").read_text() == manifest["digest"]
    assert json.loads((out / "metrics.json").read_text())["onnxruntime-cpu/passed"] == 1.0
