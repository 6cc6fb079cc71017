"""The templates in pipelines/: their commands exist, and what they read is what is written."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimizer.cli import main
from optimizer.commands import step_outputs

ROOT = Path(__file__).parent.parent.parent
PIPELINES = ROOT / "pipelines"
PYTHON = sorted(PIPELINES.rglob("*.py"))
SCHEMAS = shutil.which("check-jsonschema")


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((PIPELINES / name).read_text()))


def commands() -> Iterator[list[str]]:
    """Every `optimize ...` in the templates, with something plain for what a tool fills in."""
    (action,) = documents("github/action.yml")
    yield shlex.split(action["runs"]["steps"][0]["run"])
    job = documents("gitlab/template.yml")[1]["optimize"]
    yield shlex.split(job["script"][0])
    (argo,) = documents("argo/workflow-template.yaml")
    for template in argo["spec"]["templates"]:
        if "container" in template:
            yield [*template["container"]["command"], *template["container"]["args"]]
    (task,) = documents("tekton/task.yaml")
    first = task["spec"]["steps"][0]
    yield [*first["command"], *first["args"]]
    for file in PYTHON:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.List) and node.elts and plain(node.elts[0]) == "optimize":
                yield [plain(word) for word in node.elts if not isinstance(word, ast.Starred)]


def plain(word: ast.expr) -> str:
    """A word of a command; "x" for what is only known when it runs."""
    return str(word.value) if isinstance(word, ast.Constant) else "x"


COMMANDS = list(commands())


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_a_command_of_a_template_exists_and_takes_these_arguments(words: list[str]) -> None:
    program, name, *arguments = words
    assert program == "optimize"
    main.commands[name].make_context(name, arguments, parent=None, obj={})


def test_every_template_has_a_command() -> None:
    templates = [*PYTHON, *PIPELINES.rglob("*.y*ml")]
    assert len(COMMANDS) == len(templates) + 4  # Argo, KFP, Metaflow and Airflow publish too


def test_what_the_templates_read_is_written() -> None:
    (action,) = documents("github/action.yml")
    (argo,) = documents("argo/workflow-template.yaml")
    (task,) = documents("tekton/task.yaml")
    (parameters,) = [
        t["outputs"]["parameters"] for t in argo["spec"]["templates"] if "outputs" in t
    ]
    assert set(action["outputs"]) == set(step_outputs.VALUES)
    assert {Path(p["valueFrom"]["path"]).name for p in parameters} <= set(step_outputs.VALUES)
    assert {r["name"] for r in task["spec"]["results"]} <= set(step_outputs.VALUES)
    copied = re.findall(r"^cp (\S+)", task["spec"]["steps"][1]["script"], re.M)
    assert set(copied) == {r["name"] for r in task["spec"]["results"]}
    reports = documents("gitlab/template.yml")[1]["optimize"]["artifacts"]["reports"]
    assert {Path(p).name for p in reports.values()} == {"junit.xml", "optimize.env"}


def test_the_action_runs_as_github_runs_it_and_ends_as_the_command_does(tmp_path: Path) -> None:
    (action,) = documents("github/action.yml")
    (step,) = action["runs"]["steps"]
    inputs = {name: given.get("default", "") for name, given in action["inputs"].items()}
    inputs |= {"recipe": "no such; recipe.yaml", "outputs": "the outputs"}
    shim = tmp_path / "bin" / "optimize"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m optimizer "$@"\n')
    shim.chmod(0o755)
    environment = {
        name: inputs[re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value)[1]]  # type: ignore[index]
        for name, value in step["env"].items()
    }
    environment |= {
        "PATH": f"{shim.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, "no such; recipe.yaml" in done.stderr) == (2, True), done.stderr
    lines = dict(line.split("=", 1) for line in (tmp_path / "output").read_text().splitlines())
    assert lines == {"verdict": "error", "exit_code": "2", "digest": "", "bundle": ""}
    assert (tmp_path / "the outputs" / "junit.xml").is_file()


@pytest.mark.slow
@pytest.mark.skipif(SCHEMAS is None, reason="check-jsonschema is not on the PATH")
def test_the_action_is_one_by_githubs_own_schema() -> None:
    command: list[Any] = [SCHEMAS, "--builtin-schema", "vendor.github-actions"]
    done = subprocess.run(
        [*command, PIPELINES / "github" / "action.yml"],
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
