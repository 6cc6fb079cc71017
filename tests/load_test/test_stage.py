"""A server's load test is judged by the recipe's objectives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from optimizer.cli import main
from optimizer.foundation.errors import RecipeError
from optimizer.harness.bounds import fewest
from optimizer.load_test import stage
from optimizer.recipe import file as recipe_file
from optimizer.recipe.serving import Slo, solve_mean_requests
from tests.conftest import write_tiny_recipe
from tests.package.bundles import small_bundle

RATE = 200.0
SECONDS = 1.01 * solve_mean_requests(fewest(99)) / RATE


def judged(p99: list[float | None], **run: Any) -> list[tuple[str, str]]:
    """(name, verdict) of each gate, with a limit of 50 ms."""
    counts = {"sent": 1000, "wrong": 0, "lost": 0, "refused": 0} | run
    document = {"runs": [{"rate": RATE, **counts, "latency": {"p99": p99}}]}
    section = Slo(rate=RATE, seconds=60.0, p99_ms=50.0, max_refused=0.1)
    return [(g.name, g.verdict) for g in stage.judge_run(document, section)]


@pytest.mark.parametrize(
    ("p99", "verdict"),
    [
        ([30.0, 20.0, 49.0], "pass"),
        ([60.0, 51.0, 80.0], "fail"),
        ([49.0, 40.0, 51.0], "inconclusive"),
        ([40.0, 30.0, None], "inconclusive"),
    ],
)
def test_the_whole_interval_of_the_percentile_decides(
    p99: list[float | None], verdict: str
) -> None:
    assert judged(p99) == [("slo.answered", "pass"), ("slo.latency", verdict)]


@pytest.mark.parametrize(
    ("run", "verdict"),
    [({"refused": 100}, "pass"), ({"refused": 101}, "fail"), ({"wrong": 1}, "fail")],
)
def test_fast_answers_do_not_compensate_for_wrong_or_missing_ones(
    run: dict[str, int], verdict: str
) -> None:
    assert judged([1.0, 1.0, 1.0], **run)[0] == ("slo.answered", verdict)


def test_without_a_rate_one_must_be_met() -> None:
    section = Slo(p99_ms=50.0)
    for met, undecided, verdict in (
        (12.0, True, "pass"),
        (None, False, "fail"),
        (None, True, "inconclusive"),
    ):
        highest = {"met": met, "missed": 13.0, "undecided": undecided}
        (gate,) = stage.judge_run({"highest_rate": highest}, section)
        assert (gate.name, gate.verdict) == ("slo.rate", verdict)


def test_so_few_requests_that_nothing_can_be_decided_are_refused_with_how_many_do() -> None:
    with pytest.raises(ValidationError) as refused:
        Slo(rate=1.0, seconds=30.0, p99_ms=50.0)
    (seconds,) = re.findall(r"set seconds: (\d+)", str(refused.value))
    assert int(seconds) > fewest(99)
    Slo(rate=1.0, seconds=float(seconds), p99_ms=50.0)


def test_a_bundle_is_served_and_held_to_its_objectives(tmp_path: Path) -> None:
    packaged, out = small_bundle.make(tmp_path / "made"), tmp_path / "out"
    out.mkdir()
    stage.run(Slo(rate=RATE, seconds=SECONDS, p99_ms=1e-6, max_refused=1.0), packaged, out)
    slo = json.loads((out / stage.FILE).read_text())
    verdicts = {g["name"]: g["verdict"] for g in slo["gates"]}
    assert verdicts == {"slo.answered": "pass", "slo.latency": "fail"}
    assert (slo["verdict"], slo["target"]) == ("fail", "onnxruntime-cpu")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("slo={}", "no objective"),
        ("slo={p99_ms: 50.0, between_p99_ms: 5.0}", "slo.between_p99_ms applies only to text"),
        ("serve={slots: 4}", "serve.slots applies only to text generation"),
        ("serve={rows: 0}", "rows"),
    ],
)
def test_a_recipe_says_what_its_task_has_no_use_for(
    override: str, message: str, tmp_path: Path
) -> None:
    file = write_tiny_recipe(tmp_path, tmp_path / "model")
    result = CliRunner().invoke(main, ["check", str(file), "--set", override])
    assert result.exit_code == 2
    assert message in result.stderr


def test_workers_need_a_target_that_runs_several_batches_at_once(tmp_path: Path) -> None:
    file = write_tiny_recipe(tmp_path, tmp_path / "model")
    recipe_file.read(file, ["serve={workers: 2}"])
    elsewhere = "targets=[{runtime: openvino, device: cpu}]"
    recipe_file.read(file, ["serve={workers: 1}", elsewhere])
    with pytest.raises(RecipeError, match="no target runs several batches at once"):
        recipe_file.read(file, ["serve={workers: 2}", elsewhere])


def test_a_bundle_has_its_settings_and_not_what_it_is_held_to(tmp_path: Path) -> None:
    file = write_tiny_recipe(tmp_path, tmp_path / "model")
    recipe = recipe_file.read(file, ["serve={rows: 4}", "slo={p99_ms: 50.0}"])
    bundled = recipe.packaging.recipe.model_dump(mode="json", by_alias=True)
    assert (bundled["serve"]["rows"], bundled["slo"]) == (4, None)


@pytest.mark.slow
def test_a_run_whose_server_misses_its_objective_ends_without_a_bundle(
    tiny_bert: Path, tmp_path: Path
) -> None:
    recipe = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    places = ["--store", str(tmp_path / "store"), "--artifacts", str(tmp_path / "artifacts")]
    codes = {}
    for limit in ("1.0e-6", "60000.0"):
        slo = f"slo={{rate: {RATE}, seconds: {SECONDS}, p99_ms: {limit}, max_refused: 1.0}}"
        result = CliRunner().invoke(main, ["--json", "run", str(recipe), *places, "--set", slo])
        document = json.loads(result.stdout)
        codes[limit] = (result.exit_code, document["bundle"] is None)
        failing = [g["name"] for g in document["reports"][0]["gates"] if g["verdict"] == "fail"]
        if limit == "60000.0":
            assert failing == []
            continue
        assert failing == ["slo.latency"]
        page = tmp_path / "artifacts/tiny/1.failed/report.html"
        assert "slo.latency" in page.read_text("utf-8")
    assert codes["1.0e-6"] == (3, True)
    assert codes["60000.0"] in ((0, False), (4, True))
