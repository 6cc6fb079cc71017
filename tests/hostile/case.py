"""Cases of wrong files: how each is made, run and judged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXITS = (0, 2, 5)  # harmless; the user's; the machine's
MEMORY = 1_000_000_000


@dataclass(frozen=True)
class Case:
    """One wrong file.

    write: changes a copy of the good folder
    argv: arguments of `optimize`
    culprit: words that the message must contain
    harmless: True where the file may also be accepted
    """

    name: str
    write: Callable[[Path], Any]
    argv: tuple[str, ...]
    culprit: tuple[str, ...] = ()
    harmless: bool = False
    stdin: str | None = None


class Worker:
    """Warm process, started at its first use and again after it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "ready\n"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End the process, which waits for a job and ends with its input."""
        if self._process is not None:
            self._process.communicate()


def problems(case: Case, answer: dict[str, Any]) -> list[str]:
    """List the problems with the end of a case."""
    exit_code, text = answer["exit"], answer["stderr"]
    complaints = []
    if exit_code is None:
        complaints.append(f"still running after {answer['seconds']:.0f} s")
    elif exit_code not in EXITS:
        complaints.append(f"exit {exit_code}")
    elif exit_code == 0 and not case.harmless:
        complaints.append("accepted")
    if "Traceback (most recent call last)" in text or "bug here" in text:
        complaints.append("a traceback, or called a bug")
    if answer["grown"] > MEMORY:
        complaints.append(f"{answer['grown'] / 1e9:.1f} GB of memory")
    if exit_code in (2, 5):
        complaints += [f"{word!r} is not named" for word in case.culprit if word not in text]
    return complaints


def run(
    worker: Worker, cases: Sequence[Case], good: Path, scratch: Path
) -> list[tuple[Case, list[str], dict[str, Any]]]:
    """Run each case on a fresh copy of the folder `good`; return the failures."""
    failures = []
    for i, case in enumerate(cases):
        folder = scratch / f"case-{i}"
        shutil.copytree(good, folder)
        try:
            case.write(folder)
            answer = worker.ask({"argv": case.argv, "cwd": str(folder), "stdin": case.stdin})
        finally:
            for path in [folder, *folder.rglob("*")]:
                if path.is_dir() and not path.is_symlink():
                    path.chmod(0o700)
            shutil.rmtree(folder)
        if complaints := problems(case, answer):
            failures.append((case, complaints, answer))
    return failures


def described(failures: Sequence[tuple[Case, list[str], dict[str, Any]]]) -> str:
    """Describe failures, one per line, with the end of the command's output."""
    return "\n".join(
        f"{case.name}: {'; '.join(complaints)}: {answer['stderr'].strip()[-300:]}"
        for case, complaints, answer in failures
    )
