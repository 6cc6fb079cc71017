"""The templates in pipelines/: their commands exist, and the files they read are written."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimizer.cli import main
from optimizer.commands.build import step_outputs

ROOT = Path(__file__).parents[3]
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
    (ray,) = documents("ray/rayjob.yaml")
    yield shlex.split(ray["spec"]["entrypoint"])
    (queued,) = documents("kueue/search-job.yaml")
    (container,) = queued["spec"]["template"]["spec"]["containers"]
    yield [*container["command"], *container["args"]]
    yield shlex.split(documents("skypilot/search.yaml")[0]["run"])
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
    copied = re.findall(r"^cp (\S+)", tekton_script(), re.M)
    assert set(copied) == {r["name"] for r in task["spec"]["results"]}
    reports = documents("gitlab/template.yml")[1]["optimize"]["artifacts"]["reports"]
    assert {Path(p).name for p in reports.values()} == {"junit.xml", "optimize.env"}


def scripts(document: Any) -> Iterator[str]:
    """Every text that a shell runs, of a template."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key in ("run", "script", "before_script", "after_script", "source"):
                yield from [value] if isinstance(value, str) else value
            else:
                yield from scripts(value)
    elif isinstance(document, list):
        for value in document:
            yield from scripts(value)


def tekton_script() -> str:
    (task,) = documents("tekton/task.yaml")
    return str(task["spec"]["steps"][1]["script"])


def test_no_input_of_a_pipeline_becomes_text_of_a_script() -> None:
    found = [
        script
        for file in PIPELINES.rglob("*.y*ml")
        for document in yaml.safe_load_all(file.read_text())
        for script in scripts(document)
    ]
    assert len(found) == 4  # GitHub, GitLab, Tekton, SkyPilot
    pasted = re.compile(r"\$\{\{|\$\[\[|\{\{|\$\((params|inputs|workspaces)")
    assert [script for script in found if pasted.search(script)] == []
    fields = [ast.literal_eval(f"'x{sign}'") for sign in ("${{ inputs.a }}", "$[[ inputs.a ]]")]
    assert all(map(pasted.search, fields))


HOSTILE = (
    'x"; touch INJECTED; echo "',
    "$(touch INJECTED)",
    "`touch INJECTED`",
    "a'; touch INJECTED; '",
    "--help",
    "a\ntouch INJECTED\n",
    "-- --outputs ..",
    "*",
)


@pytest.mark.parametrize("recipe", HOSTILE)
def test_gitlabs_script_takes_any_name_of_a_recipe_for_a_name(recipe: str, tmp_path: Path) -> None:
    job = documents("gitlab/template.yml")[1]["optimize"]
    (script,) = job["script"]
    given = job["variables"]["OPTIMIZE_RECIPE"]
    assert given == {"value": "$[[ inputs.recipe ]]", "expand": False}
    seen, shim = tmp_path / "seen", tmp_path / "bin" / "optimize"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > {seen}\n')
    shim.chmod(0o755)
    environment = {"PATH": f"{shim.parent}:{os.environ['PATH']}", "OPTIMIZE_RECIPE": recipe}
    subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, check=True)
    assert seen.read_text().split("\0")[-3:] == ["--", recipe, ""]
    assert not (tmp_path / "INJECTED").exists()


def optimize_that_is_killed(tmp_path: Path) -> dict[str, str]:
    """An environment whose `optimize` is killed at once, beside the outputs of an earlier run."""
    out = tmp_path / "outputs"
    ended = step_outputs.Ended(0, "pass", {"reports": []}, "done", tmp_path, None, "ab")
    step_outputs.write(ended, out, "earlier")
    (out / "report.html").write_text("<p>")
    shim = tmp_path / "bin" / "optimize"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\nkill -9 $$\n")
    shim.chmod(0o755)
    return {"PATH": f"{shim.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("code", "run_id", "wanted"),
    [
        *(("0", "this", 0), ("3", "this", 3), ("4", "this", 4), ("-1", "this", 1)),
        *(("137", "this", 1), ("0", "earlier", 1), ("3", "earlier", 1), ("", "this", 1)),
    ],
)
def test_tektons_task_ends_as_the_step_did_and_not_as_an_earlier_run(
    code: str, run_id: str, wanted: int, tmp_path: Path
) -> None:
    ended = step_outputs.Ended(0, "pass", {}, "done", Path("b"), None, "ab")
    step_outputs.write(ended, tmp_path / "optimize-outputs", run_id)
    (tmp_path / "code").write_text(code)
    script = tekton_script()
    for name in ("verdict", "digest", "bundle"):
        script = script.replace(f"$(results.{name}.path)", str(tmp_path / name))
    script = script.replace("$(steps.step-optimize.exitCode.path)", str(tmp_path / "code"))
    environment = {"PATH": os.environ["PATH"], "RUN_ID": "this"}
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == wanted
    assert (tmp_path / "verdict").exists() is (wanted == int(code or 9))


class Failed(Exception):
    def __init__(self, message: str, **_: Any) -> None:
        super().__init__(message)


class Stand:
    """In place of a tool's package: decorators that leave functions as they are, and any name."""

    Failure = AirflowException = AirflowFailException = AirflowSkipException = Failed
    Config = FlowSpec = object
    dag: Any

    def __getattr__(self, name: str) -> Any:
        return Stand()

    def __getitem__(self, key: object) -> Any:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else self


ENTRIES = {
    "kfp": "module['optimize']('r.yaml', WORK, None, None, None)",
    "dagster": "list(module['bundle'](types.SimpleNamespace(recipe='r.yaml', work=WORK)))",
    "metaflow": "flow = module['Optimize'](); flow.recipe = 'r.yaml'; flow.work = WORK\n"
    "flow.start()",
}


@pytest.mark.parametrize("tool", ENTRIES)
def test_a_killed_optimize_fails_the_step_whatever_lies_in_its_outputs(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in optimize_that_is_killed(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, tool, Stand())  # type: ignore[arg-type]
    (file,) = (PIPELINES / tool).glob("*.py")
    module = runpy.run_path(str(file))
    with pytest.raises((SystemExit, Failed), match="exit code -9"):
        exec(ENTRIES[tool], {"module": module, "WORK": str(tmp_path), "types": types})


def test_a_killed_optimize_fails_airflows_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in optimize_that_is_killed(tmp_path).items():
        monkeypatch.setenv(name, value)
    stand = Stand()
    stand.dag = lambda *_, **__: lambda release: lambda: release
    for name in ("airflow", "airflow.sdk", "airflow.sdk.exceptions"):
        monkeypatch.setitem(sys.modules, name, stand)  # type: ignore[arg-type]
    (file,) = (PIPELINES / "airflow").glob("*.py")
    module = runpy.run_path(str(file))
    constants = module["release"]().__code__.co_consts
    (code,) = [c for c in constants if getattr(c, "co_name", "") == "optimize"]
    task = types.FunctionType(code, module)
    with pytest.raises(Failed, match="exit code -9"):
        task({"recipe": "r.yaml", "work": str(tmp_path)})


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
