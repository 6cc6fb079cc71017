"""Crowds of runs on one artifacts folder, some of them killed.

    python -m tests.crowd RECIPE HOME --rounds 50 --seed 0

Prints one JSON document: how many runs there were, and what went wrong with them. The parent
imports every heavy package once, so that a run costs only its own work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimizer.store import digest_file
from tests import killable, killing

FINISHED, FRESH, EACH, AGAIN = "finished store", "fresh store", "a store each", "measured again"
KINDS = (FINISHED, FRESH, FINISHED, EACH, FINISHED, FINISHED, FRESH, FINISHED, AGAIN, FINISHED)
"""Store of the runs in a round, which share the artifacts folder.

"measured again" is a finished store in which the first run validates again. A run on a finished
store takes a fraction of a second, the others take a dozen.
"""
CALLS = 150
"""Approximate number of calls that touch the artifacts folder while the bundle is published."""


@dataclass
class Crowds:
    """Rounds of runs. home: an empty folder. figures: counts, with the keys of `run`."""

    recipe: Path
    home: Path
    seed: int
    digest: str = ""
    seconds: float = 5.0
    figures: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def artifacts(self) -> Path:
        return self.home / "artifacts"

    def first(self) -> None:
        """A crowd of two on fresh ground; its bundle is what all others are compared with."""
        started = time.monotonic()
        store = self.home / "store"
        codes = [killing.wait(pid) for pid in [self._start(store), self._start(store)]]
        self.seconds = time.monotonic() - started
        self.figures.update(rounds=1, runs=2)
        if codes != [0, 0]:
            self.wrong.append(f"first: exits {codes}")
        self.digest = self._content_digest("first")

    def round(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        kind = KINDS[number % len(KINDS)]
        size = 2 if kind == EACH else rng.choice([2, 3, 4])
        started = time.monotonic()
        stores = self._stores(kind, size)
        what = f"round {number}, {size} runs, {kind}"
        victim = rng.choice(["nobody", "any time", "publishing"])
        publishing = [rng.randrange(CALLS)] if victim == "publishing" else []
        pids = [
            self._start(store, again=kind == AGAIN and i == 0, kill_at=n)
            for i, (store, n) in enumerate(zip(stores, [*publishing, *[None] * size], strict=False))
        ]
        if victim == "any time":
            short = 0.2 if kind == FINISHED else 1.0
            time.sleep(rng.random() * self.seconds * short)
            os.kill(pids[0], signal.SIGKILL)
        codes = [killing.wait(pid) for pid in pids]
        self.figures.update(rounds=1, runs=size, kills=codes.count(-9))
        self.figures[f"killed: {victim}"] += codes.count(-9)
        bad = [c for c in codes if c not in (0, -9 if victim != "nobody" else 0)]
        if bad:
            self.wrong.append(f"{what}: exits {codes}")
        if 0 in codes:
            self._content_digest(what)
        if -9 in codes:
            self._rerun(stores[0], what)
        self._tidy(what)
        print(f"{what}: {codes}, {time.monotonic() - started:.1f} s", file=sys.stderr)

    def _rerun(self, store: Path, what: str) -> None:
        self.figures["reruns"] += 1
        code = killing.wait(self._start(store))
        if code:
            self.wrong.append(f"{what}: the rerun ended with {code}")
        self._content_digest(f"{what}, after the rerun")

    def _stores(self, kind: str, size: int) -> list[Path]:
        """One per run, fresh or copies of the finished one."""
        finished = self.home / "store"
        folder = self.home / "stores"
        shutil.rmtree(folder, ignore_errors=True)
        if kind == EACH:
            return [folder / str(n) for n in range(size)]
        if kind != FRESH:
            shutil.copytree(finished, folder / "one")
        return [folder / "one"] * size

    def _start(self, store: Path, *, again: bool = False, kill_at: int | None = None) -> int:
        job = {
            "recipe": str(self.recipe),
            "store": str(store),
            "artifacts": str(self.artifacts),
            "remeasure": again,
        }

        def work() -> None:
            sys.stderr = sys.stdout = (self.home / "log").open("a")
            code = killable.work(job)
            if code:
                os._exit(code)

        return killing.start(work, kill_at, str(self.artifacts))

    def _content_digest(self, what: str) -> str:
        """Of the bundle, each file of which is what its manifest says."""
        folder = self.artifacts / "tiny" / "1"
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        files = {
            p.relative_to(folder).as_posix(): digest_file(p)
            for p in folder.rglob("*")
            if p.is_file() and p.name != "manifest.json"
        }
        if files != {name: entry["sha256"] for name, entry in manifest["files"].items()}:
            self.wrong.append(f"{what}: the bundle is damaged")
        digest = str(manifest["content_digest"])
        if self.digest and digest != self.digest:
            self.wrong.append(f"{what}: content_digest {digest}")
        return digest

    def _tidy(self, what: str) -> None:
        """Nothing is left beside the bundle."""
        names = sorted(p.name for p in (self.artifacts / "tiny").iterdir())
        if names != ["1", "tiny-1.tar"]:
            self.wrong.append(f"{what}: {names}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    parser.add_argument("home", type=Path)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    args.home.mkdir(parents=True, exist_ok=True)
    killable.warm()
    crowds = Crowds(args.recipe, args.home, args.seed)
    crowds.first()
    for number in range(args.rounds - 1):
        crowds.round(number)
    print(json.dumps({**crowds.figures, "wrong": crowds.wrong}))


if __name__ == "__main__":
    main()
