"""`optimize inspect`: six lines first, the list of files only when asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.commands.bundle.overview import summarize
from optimizer.harness.bundle.manifest import read_manifest
from tests.harness import small_model
from tests.package.bundles import small_bundle
from tests.package.report.documents import report

NAMES = ["bundle", "task", "quality", "latency", "size", "runs here"]
HERE = [{"target": "onnxruntime-cpu", "how": "load", "why": "fits: portable ONNX"}]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_bundle.make(tmp_path_factory.mktemp("made")) / "bundle"


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


def test_six_lines_say_what_it_is_and_if_it_runs_here(bundle: Path) -> None:
    lines = inspect(bundle).stdout.splitlines()
    assert [line[:11].strip() for line in lines[:6]] == NAMES
    assert lines[0][11:].startswith("tiny version 1: INT8 of made here, licence apache-2.0")
    assert lines[1].endswith("a text (up to 32 tokens) in, embedding of 32 numbers out")
    assert "yes, by onnxruntime-cpu" in lines[5]
    assert list(json.loads(inspect("--json", bundle).stdout)["overview"]) == NAMES


def test_files_are_listed_only_when_asked_for(bundle: Path) -> None:
    name = "model/onnxruntime-cpu/model.onnx"
    assert f"  {name}" not in inspect(bundle).stdout
    assert f"  {name}" in inspect(bundle, "--files").stdout


def lines_of(bundle: Path, reports: list[Any], fits: list[Any], **changes: Any) -> dict[str, str]:
    manifest = {**read_manifest(bundle), **changes}
    engines = manifest["engines"][-1:]
    return summarize({**manifest, "engines": engines}, reports, fits, "not shown: damaged")


def test_figures_are_those_of_the_report_with_their_intervals(bundle: Path) -> None:
    lines = lines_of(bundle, [report()], HERE)
    assert lines["quality"] == (
        "probe accuracy 87.8 % (85.9 to 89.5), float 88.2 %, change −0.41 points (−1.09 to +0.26), "
        "margin 0.02: pass"
    )
    assert "0.42× (0.41 to 0.44) the time of ONNX Runtime float; on Intel Xeon" in lines["latency"]
    assert lines["size"].startswith("model file 58.9 MB, 0.65× of float; folder ")


def test_the_size_of_a_target_that_is_not_timed_is_its_reports(bundle: Path) -> None:
    judged = report()
    sizes = judged.pop("speed")["size"]
    lines = lines_of(bundle, [{**judged, "speed": None, "size": sizes}], HERE)
    assert lines["size"].startswith("model file 58.9 MB, 0.65× of float; folder ")


def test_each_adapter_has_its_quality(bundle: Path) -> None:
    judged = report()
    gates = [{"name": "adapter.sql.quality.probe_accuracy", "verdict": "fail"}]
    sections = {"sql": judged["quality"]}
    changed = {**judged, "adapters": sections, "gates": [*judged["gates"], *gates]}
    lines = lines_of(bundle, [changed], HERE)
    assert lines["adapters"] == "sql: " + lines["quality"].replace(": pass", ": fail")


def test_without_an_engine_or_a_report_the_lines_say_why(bundle: Path) -> None:
    fits = [{"target": "tensorrt-rtx-cuda", "how": None, "why": "gpu: no GPU was found"}]
    lines = lines_of(bundle, [], fits)
    assert lines["runs here"] == "no: not tensorrt-rtx-cuda (no GPU was found)"
    assert lines["quality"] == lines["latency"] == "not shown: damaged"


@pytest.mark.parametrize(
    ("labels", "out"),
    [(["bad", "good"], "a label (of 2: bad, good) out"), (["score"], "a number out")],
)
def test_the_output_of_a_classifier_is_its_labels(
    bundle: Path, labels: list[str], out: str
) -> None:
    contract = small_model.contract("text-classification", labels=labels)
    assert lines_of(bundle, [], HERE, contract=contract)["task"].endswith(out)
