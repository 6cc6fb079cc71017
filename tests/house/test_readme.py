"""The README says what is there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from optimizer.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXT = "\n".join([README, *(page.read_text() for page in PAGES)])
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.S)
COMMANDS = [
    line.split("#")[0].strip()
    for kind, text in BLOCKS
    if kind == "sh"
    for line in text.splitlines()
    if line.startswith("optimize ")
]


def test_the_tree_in_the_readme_is_the_real_one() -> None:
    tree = next(text for kind, text in BLOCKS if not kind and text.startswith("optimizer/"))
    named, parent = set(), ""
    for line in tree.splitlines():
        name = line.split()[0].rstrip("/")
        parent = name if not line.startswith(" ") else parent
        named.add(name if not line.startswith(" ") else f"{parent}/{name}")
    hidden = (".", "__", "optimize_toolchain")
    real = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(hidden)}
    real |= {
        f"optimizer/{p.name}"
        for p in (ROOT / "optimizer").iterdir()
        if p.is_dir() and not p.name.startswith(hidden)
    }
    assert named == real


def test_every_command_of_the_readme_exists_and_takes_these_arguments() -> None:
    assert len(COMMANDS) >= 10
    for line in COMMANDS:
        words = shlex.split(line)[1:]
        name = "run" if words[0].endswith(".yaml") else words[0]
        arguments = words if name == "run" else words[1:]
        command = main.commands[name]
        command.make_context(name, arguments, resilient_parsing=False, parent=None, obj={})


@pytest.mark.parametrize("command", ["demo", "demo-vision", "test", "check", "test-gpu"])
def test_the_makefile_has_the_named_targets(command: str) -> None:
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M)


def test_the_recipe_explained_in_the_readme_is_accepted(tmp_path: Path) -> None:
    (text,) = [t for kind, t in BLOCKS if kind == "yaml" and "# (part of a recipe)" not in t]
    assert yaml.safe_load(text)["name"] == "minilm-int8"
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    result = CliRunner().invoke(main, ["check", str(file)])
    assert result.exit_code == 0, result.stderr


def test_the_exit_codes_of_the_readme_are_those_of_the_errors() -> None:
    from optimizer.foundation import errors

    table = {int(code) for code in re.findall(r"^\| (\d) \|", README, re.M)}
    used = {
        e.exit_code
        for e in vars(errors).values()
        if isinstance(e, type) and issubclass(e, errors.OptimizeError)
    }
    assert table == used | {0}


def test_the_readme_names_every_page_and_links_lead_somewhere() -> None:
    pages = {f"docs/{page.name}" for page in PAGES}
    assert set(re.findall(r"\]\((docs/[^)]*)\)", README)) == pages
    for file in (ROOT / "README.md", *PAGES):
        for link in re.findall(r"\]\(([^):]*)\)", file.read_text()):
            assert link.startswith("#") or (file.parent / link).exists(), f"{file.name}: {link}"


@pytest.mark.slow
def test_the_commands_of_the_readme_run_in_their_order(tmp_path: Path) -> None:
    for folder in ("recipes", "calibration"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for line in COMMANDS:
        words = shlex.split(line)[1:]
        if line not in README or words[0] == "serve":
            continue  # of another page, or running until it is stopped
        for bundle in (w for w in words if w == "artifacts/other/1"):
            shutil.copytree(tmp_path / "artifacts/minilm-int8/1", tmp_path / bundle)
        command = [sys.executable, "-m", "optimizer", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert (done.returncode, line) == (0, line), done.stderr[-2000:]
