"""Killed at any instant, nothing half-written is taken for done, and the rerun ends the same."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optimizer.store import MADE_FROM, digest_file
from tests.conftest import write_tiny_recipe

SEEDS = 20


class Runner:
    """Talks to tests/killable.py."""

    def __init__(self, recipe: Path) -> None:
        self.recipe = recipe
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.killable"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, home: Path, kill_after: float | None = None) -> int:
        job = {
            "recipe": str(self.recipe),
            "store": str(home / "store"),
            "artifacts": str(home / "artifacts"),
            "kill_after": kill_after,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(json.loads(self._read())["exit"])


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Iterator[Runner]:
    started = Runner(write_tiny_recipe(tmp_path_factory.mktemp("recipe"), tiny_bert))
    yield started
    assert started.process.stdin is not None
    started.process.stdin.close()
    started.process.wait()
    assert started.process.stdout is not None
    started.process.stdout.close()


@pytest.fixture(scope="module")
def undisturbed(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of a run nobody killed, and how long it took."""
    home = tmp_path_factory.mktemp("undisturbed")
    began = time.monotonic()
    assert runner.run(home) == 0
    return home, time.monotonic() - began


def manifest(home: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        (home / "artifacts" / "tiny" / "1" / "manifest.json").read_text()
    )
    return document


def finished(home: Path) -> dict[str, int]:
    """{finished step: the inode of its made_from.json}: a redone step gets another inode."""
    return {
        str(p.parent.relative_to(home)): p.stat().st_ino
        for p in (home / "store").glob(f"*/*/{MADE_FROM}")
    }


def test_the_same_recipe_twice_gives_the_same_bundle(
    runner: Runner, undisturbed: tuple[Path, float], tmp_path: Path
) -> None:
    assert runner.run(tmp_path) == 0
    one, two = manifest(undisturbed[0]), manifest(tmp_path)
    assert one["digest"] == two["digest"]
    fixed = [n for n, f in one["files"].items() if not f["measured"]]
    assert any(n.endswith(".onnx") for n in fixed)
    for name in fixed:
        assert digest_file(tmp_path / "artifacts/tiny/1" / name) == one["files"][name]["sha256"]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_killed_run_goes_on_where_it_was_and_ends_in_the_same_bundle(
    runner: Runner, undisturbed: tuple[Path, float], tmp_path: Path, seed: int
) -> None:
    home, whole = undisturbed
    runner.run(tmp_path, kill_after=random.Random(seed).uniform(0.02, 0.98) * whole)
    before = finished(tmp_path)
    assert runner.run(tmp_path) == 0
    after = finished(tmp_path)
    assert {k: after[k] for k in before} == before, "a finished step was redone"
    assert manifest(tmp_path)["digest"] == manifest(home)["digest"]
    assert not list(tmp_path.glob("**/*.partial"))
