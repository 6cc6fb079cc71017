"""Killed at any instant, nothing half-written is taken for done, and the rerun ends the same.

A random instant of a whole run would nearly always fall into its two slow stages. So each of the
seven stages is killed in turn, at a random instant of its own length: 7 kills a chain, 29 chains.
All but one are slow tests.
(A stage may run several times faster than it did before, when other work on the machine has ended,
and is then over before its kill: the chain begins again with earlier kills.)
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from optimizer.store import MADE_FROM, STAGES, digest_file
from tests.conftest import write_tiny_recipe

CHAINS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 29))]


class Runner:
    """Talks to tests/killable.py.

    shared: folder of what is computed once for all tests
    options: more of its job's fields
    """

    def __init__(self, recipe: Path, shared: Path, **options: Any) -> None:
        self.recipe, self.options = recipe, options
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.killable", str(shared)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, home: Path, kill_in: str | None = None, after: float = 0.0) -> int:
        job = {
            "recipe": str(self.recipe),
            "store": str(home / "store"),
            "artifacts": str(home / "artifacts"),
            "kill_in": kill_in,
            "after": after,
            **self.options,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(json.loads(self._read())["exit"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def runner(
    tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path, shared_folder: Path
) -> Iterator[Runner]:
    started = Runner(write_tiny_recipe(tmp_path_factory.mktemp("recipe"), tiny_bert), shared_folder)
    yield started
    started.close()


@pytest.fixture(scope="module")
def first(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run nobody killed. It computes what later runs find in the shared folder."""
    home = tmp_path_factory.mktemp("first")
    assert runner.run(home) == 0
    return home


@pytest.fixture(scope="module")
def undisturbed(runner: Runner, first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of another such run, as long as those that are killed."""
    assert first.is_dir()
    home = tmp_path_factory.mktemp("undisturbed")
    assert runner.run(home) == 0
    return home


def lengths(home: Path) -> dict[str, float]:
    """Seconds from a stage's first file to its last, read off the finished folders."""
    found = {}
    for made_from in (home / "store").glob(f"*/*/{MADE_FROM}"):
        lock = made_from.parent.with_suffix(".lock")
        found[made_from.parent.parent.name] = made_from.stat().st_mtime - lock.stat().st_mtime
    return found


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
        if p.parent.suffix != ".partial"
    }


def killed(
    runner: Runner,
    undisturbed: Path,
    home: Path,
    seed: int,
    share: float,
    stages: Sequence[str] = STAGES,
) -> bool:
    """Kill each of `stages` within the first `share` of its usual time; return True if all were.

    Steps that had finished before a kill must not run again.
    """
    random_, before = random.Random(seed), dict[str, int]()
    for stage, length in ((s, n) for s in stages if (n := lengths(undisturbed).get(s))):
        if runner.run(home, stage, share * random_.random() * length) != -9:
            return False
        after = finished(home)
        assert {k: after[k] for k in before} == before, "a finished step was redone"
        before = after
    return True


def test_the_same_recipe_twice_gives_the_same_bundle(first: Path, undisturbed: Path) -> None:
    one, two = manifest(first), manifest(undisturbed)
    assert one["content_digest"] == two["content_digest"]
    fixed = [n for n, f in one["files"].items() if not f["measured"]]
    assert any(n.endswith(".onnx") for n in fixed)
    for name in fixed:
        assert digest_file(undisturbed / "artifacts/tiny/1" / name) == one["files"][name]["sha256"]


@pytest.mark.parametrize("seed", CHAINS)
def test_a_killed_run_goes_on_where_it_was_and_ends_in_the_same_bundle(
    runner: Runner, undisturbed: Path, tmp_path: Path, seed: int
) -> None:
    homes = (tmp_path / str(n) for n in range(8))
    home = next(h for n, h in enumerate(homes) if killed(runner, undisturbed, h, seed, 0.5 / 2**n))
    before = finished(home)
    assert runner.run(home) == 0
    after = finished(home)
    assert {k: after[k] for k in before} == before, "a finished step was redone"
    assert manifest(home)["content_digest"] == manifest(undisturbed)["content_digest"]
    assert not list(home.glob("**/*.partial"))
