"""The templates that are Python run in their own tools, each in an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from optimizer.publish.registries.layout import OciLayout
from tests.conftest import write_tiny_recipe

ROOT = Path(__file__).parents[3]
PIPELINES = ROOT / "pipelines"
ENVIRONMENTS = os.environ.get("OPTIMIZE_TEST_ENVIRONMENTS", "")
PACKAGES = {
    "kfp": "kfp==2.17.0",
    "dagster": "dagster==1.13.29",
    "metaflow": "metaflow==2.19.39",
    "airflow": "apache-airflow==3.3.2",
}

KFP = """
import sys
sys.path.insert(0, {folder!r})
from kfp import compiler, local
local.init(local.SubprocessRunner(use_venv=False), pipeline_root={root!r}, raise_on_error=False)
import pipeline
compiler.Compiler().compile(pipeline.release, {root!r} + "/pipeline.yaml")
pipeline.release(recipe={recipe!r}, work={work!r}, publish_to={to!r})
"""
DAGSTER = """
import json, sys
sys.path.insert(0, {folder!r})
import dagster, definitions
config = dagster.RunConfig(dict(bundle=definitions.Run(recipe={recipe!r}, work={work!r})))
result = dagster.materialize([definitions.bundle], run_config=config, raise_on_error=False)
print(json.dumps(dict(
    success=result.success,
    checks=[c.passed for c in result.get_asset_check_evaluations()],
    digest=[m.metadata["digest"].value for m in result.asset_materializations_for_node("bundle")])))
"""


def python(tool: str) -> Path:
    """The interpreter of an environment that has the tool; skips where there is none."""
    found = Path(ENVIRONMENTS, tool, "bin", "python")
    if not ENVIRONMENTS or not found.exists():
        pytest.skip(
            f"no {tool}: python -m venv ENVIRONMENTS/{tool} && ENVIRONMENTS/{tool}/bin/pip install "
            f"{PACKAGES[tool]}, and OPTIMIZE_TEST_ENVIRONMENTS=ENVIRONMENTS"
        )
    return found


def run(command: list[object], tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """With `optimize` on the PATH, which is this checkout's."""
    shim = tmp_path / "bin" / "optimize"
    shim.parent.mkdir(exist_ok=True)
    shim.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m optimizer "$@"\n')
    shim.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment |= {"PATH": f"{shim.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), **more}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)


def last_document(text: str) -> dict[str, object]:
    return dict(json.loads([line for line in text.splitlines() if line.startswith("{")][-1]))


@pytest.fixture
def recipe(tmp_path: Path, tiny_bert: Path) -> Path:
    return write_tiny_recipe(tmp_path / "recipe", tiny_bert)


@pytest.mark.slow
@pytest.mark.parametrize(("max_drop", "passed"), [("0.1", True), ("1e-9", False)])
def test_kubeflow_pipelines_runs_both_steps_and_publishes_what_passed(
    recipe: Path, tmp_path: Path, max_drop: str, passed: bool
) -> None:
    recipe.write_text(recipe.read_text().replace("max_drop: 0.1", f"max_drop: {max_drop}"))
    layout, root = tmp_path / "layout", tmp_path / "root"
    root.mkdir()
    places = {"folder": PIPELINES / "kfp", "root": root, "recipe": recipe}
    places |= {"work": tmp_path / "work", "to": f"file://{layout}:1"}
    code = KFP.format(**{name: str(place) for name, place in places.items()})
    done = run([python("kfp"), "-c", code], tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (file,) = root.glob("optimize-*/optimize/executor_output.json")
    document = json.loads(file.read_text())
    out = tmp_path / "work" / "outputs"
    digest = (out / "digest").read_text()
    assert document["parameterValues"] == {
        "verdict": (out / "verdict").read_text(),
        "digest": digest,
    }
    (bundle,) = document["artifacts"]["bundle"]["artifacts"]
    assert bundle["metadata"].get("digest", "") == digest
    assert (OciLayout(layout).read_manifest("1") is not None) is passed is bool(digest)
    assert ("verdict is" in done.stdout) is not passed
    assert "pipelineInfo" in (root / "pipeline.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("max_drop", "passed"), [("0.1", True), ("1e-9", False)])
def test_dagster_makes_the_asset_and_its_gates_are_a_check(
    recipe: Path, tmp_path: Path, max_drop: str, passed: bool
) -> None:
    recipe.write_text(recipe.read_text().replace("max_drop: 0.1", f"max_drop: {max_drop}"))
    places = {"folder": PIPELINES / "dagster", "recipe": recipe, "work": tmp_path / "work"}
    code = DAGSTER.format(**{name: str(place) for name, place in places.items()})
    done = run([python("dagster"), "-c", code], tmp_path, DAGSTER_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    document = last_document(done.stdout)
    assert (document["success"], document["checks"]) == (passed, [passed]), done.stderr[-3000:]
    assert document["digest"] == [(tmp_path / "work/outputs/digest").read_text()]


@pytest.mark.slow
def test_metaflow_runs_the_flow(recipe: Path, tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    flow = [python("metaflow"), PIPELINES / "metaflow" / "flow.py", "--no-pylint", "run"]
    arguments = ["--recipe", recipe, "--work", tmp_path / "work", "--publish-to"]
    home = {"USERNAME": "test", "METAFLOW_HOME": str(tmp_path / "metaflow")}
    done = run([*flow, *arguments, f"file://{layout}:1"], tmp_path, **home)
    assert done.returncode == 0, done.stdout[-3000:]
    assert OciLayout(layout).read_manifest("1") is not None
    assert (tmp_path / "work/outputs/digest").read_text() in done.stdout


@pytest.mark.slow
def test_airflow_runs_the_dag(recipe: Path, tmp_path: Path) -> None:
    layout, dags = tmp_path / "layout", tmp_path / "airflow" / "dags"
    airflow = python("airflow").parent / "airflow"
    dags.mkdir(parents=True)
    shutil.copy(PIPELINES / "airflow" / "optimize_dag.py", dags)
    home = {"AIRFLOW_HOME": str(dags.parent), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    values = {"recipe": recipe, "work": tmp_path / "work", "publish_to": f"file://{layout}:1"}
    conf = json.dumps({name: str(value) for name, value in values.items()})
    for words in (["db", "migrate"], ["dags", "reserialize"], ["dags", "test", "optimize"]):
        more = ["--conf", conf] if "test" in words else []
        done = run([airflow, *words, *more], tmp_path, **home)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert OciLayout(layout).read_manifest("1") is not None, done.stdout[-3000:]
