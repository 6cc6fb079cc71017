"""The README says what is there."""

from __future__ import annotations

import json
import os
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
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = sorted(DOCS.rglob("*.md"))
TEXT = "\n".join([README, *(page.read_text() for page in PAGES)])
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.S)
COMMANDS = [
    line.split("#")[0].split(" > ")[0].strip()
    for kind, text in BLOCKS
    if kind == "sh"
    for line in text.splitlines()
    if line.startswith("optimize ")
]


def links(file: Path, under: str) -> set[Path]:
    """Files below `under`, relative to the folder of `file`, that the page `file` links to."""
    targets = re.findall(r"\]\(([^):#]+)[^)]*\)", file.read_text())
    paths = [Path(os.path.normpath(file.parent / target)) for target in targets]
    return {path for path in paths if path.is_relative_to(file.parent / under)}


def headings(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub and mkdocs write them."""
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


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
    (tmp_path / "calibration").symlink_to(ROOT / "calibration")
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


def test_the_readme_names_every_page_and_each_folder_of_pages_has_an_index_that_does() -> None:
    assert links(ROOT / "README.md", "docs") == {*DOCS.glob("*.md"), *DOCS.glob("*/index.md")}
    for index in DOCS.glob("*/index.md"):
        assert links(index, ".") >= {*index.parent.glob("*.md")} - {index}, index


def test_links_of_the_pages_lead_somewhere() -> None:
    for file in (ROOT / "README.md", *PAGES):
        for link in re.findall(r"\]\(([^):]*)\)", file.read_text()):
            path, _, heading = link.partition("#")
            target = file.parent / path if path else file
            assert target.exists(), f"{file.name}: {link}"
            assert not heading or heading in headings(target), f"{file.name}: {link}"


def test_every_decision_that_code_cites_has_a_page() -> None:
    numbers = {page.name[:4] for page in DOCS.glob("decisions/0*.md")}
    for file in [*ROOT.glob("optimizer/**/*.py"), *ROOT.glob("benchmarks/results/*.md")]:
        text = file.read_text()
        assert "docs/decisions.md" not in text, f"{file}: cite docs/decisions/NNNN"
        assert set(re.findall(r"docs/decisions/(\d{4})", text)) <= numbers, file


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


def test_the_readme_quotes_the_newest_figures_of_the_demo() -> None:
    result = json.loads((ROOT / "benchmarks/results/demo.json").read_text())
    assert "\n".join(result["table"]) in README
    assert result["when"] in README
