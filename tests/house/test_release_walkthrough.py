"""docs/release_walkthrough.sh runs: from `git clone` to a bundle that was pulled and answers."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from optimizer.cli import main
from tests.conftest import write_tiny_recipe
from tests.publish.registries.test_registry import REGISTRY, docker_registry

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "release_walkthrough.sh"
GIT, OPENSSL = shutil.which("git"), shutil.which("openssl")


def commands() -> list[list[str]]:
    """Every `optimize` command of the script, its variables left as they stand."""
    text = SCRIPT.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("$OPTIMIZE ")]
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.parametrize("words", commands(), ids=lambda words: words[0])
def test_a_command_of_the_script_exists_and_takes_these_arguments(words: list[str]) -> None:
    main.commands[words[0]].make_context(words[0], words[1:], parent=None, obj={})


def test_the_script_is_one_for_any_shell() -> None:
    assert subprocess.run(["sh", "-n", SCRIPT]).returncode == 0
    assert len(commands()) == 7


@contextmanager
def place(kind: str, folder: Path) -> Iterator[str]:
    if kind == "layout":
        yield f"file://{folder}/layout/tiny"
    else:
        with docker_registry(folder) as host:
            yield f"oci://{host}/tiny"


@pytest.mark.slow
@pytest.mark.skipif(not GIT or not OPENSSL, reason="git or openssl is not on the PATH")
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="there is no repository to clone here")
@pytest.mark.parametrize("kind", ["layout", "docker-registry"])
def test_from_a_clone_to_an_answer(kind: str, tmp_path: Path, tiny_bert: Path) -> None:
    if kind == "docker-registry" and REGISTRY is None:
        pytest.skip("docker-registry is not on the PATH (apt-get install docker-registry)")
    recipe = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    work = tmp_path / "work"
    optimize = f"env PYTHONPATH={work}/source {sys.executable} -m optimizer"  # the clone's own code
    environment = {**os.environ, "WORK": str(work), "OPTIMIZE": optimize}
    with place(kind, tmp_path) as to:
        command = ["sh", SCRIPT, ROOT, recipe, to, "the best movie"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (answer,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert answer["engine"] == "onnxruntime-cpu"
    assert len(answer["embedding"]) == 64
