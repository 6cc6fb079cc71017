"""The snippets of docs/python.md run, and its examples are those that other tests install."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compress import test_method_from_outside as method
from tests.conftest import write_tiny_recipe
from tests.load import test_outside_task as task
from tests.package.bundles import generation_bundle, small_bundle
from tests.targets import test_target_from_outside as target

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def snippet(text: str) -> str:
    """The snippet that contains `text`."""
    (found,) = [s for s in SNIPPETS if text in s]
    return str(found)


def test_a_recipe_is_run(
    tiny_bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_tiny_recipe(tmp_path, tiny_bert)
    monkeypatch.chdir(tmp_path)
    exec(snippet("pipeline.run"), {})
    assert "dense.weight" in capsys.readouterr().out


def test_a_bundle_answers_from_the_toolchain_and_from_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made").mkdir()
    (small_bundle.make(tmp_path / "made") / "bundle").rename(tmp_path / "bundle")
    monkeypatch.chdir(tmp_path)
    exec(snippet("print(bundle.decision)"), {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 ")
    done = subprocess.run(
        [sys.executable, "-c", snippet('sys.path.append("bundle")')],
        cwd=tmp_path,
        env={},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_bundle_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made").mkdir()
    generation_bundle.make(tmp_path / "made", "shared").rename(tmp_path / "decoder")
    monkeypatch.chdir(tmp_path)
    exec(snippet("bundle.generate"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "module",
    [
        method.MODULE.replace("NAME", "towards_zero").replace(', judged_by="JUDGED_BY"', ""),
        task.MODULE,
        target.MODULE,
    ],
    ids=["method", "task", "target"],
)
def test_each_example_of_a_package_is_the_one_that_a_test_installs(module: str) -> None:
    trees = [ast.dump(ast.parse(s)) for s in SNIPPETS]  # the page is formatted by ruff
    assert ast.dump(ast.parse(module)) in trees
