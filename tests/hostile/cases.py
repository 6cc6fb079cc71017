"""Cases of wrong inputs: the fault, the command that reads it, and the ends that are accepted."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from optimizer.cli import main as cli
from tests.package.bundles import generation_bundle, small_bundle

SECONDS = 20.0
DEEP: Any = None
for _ in range(40):
    DEEP = [DEEP]
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "0": 0,
    "-1": -1,
    "1.5": 1.5,
    "10^30": 10**30,
    "1e308": 1e308,
    "empty text": "",
    "text": "x",
    "NUL": "a\0b",
    "..": "../../x",
    "long text": "x" * 200_000,
    "empty list": [],
    "list of a list": [[]],
    "deep list": DEEP,
    "empty object": {},
    "object": {"x": {"y": 1}},
}


@dataclass(frozen=True)
class Case:
    """One wrong input.

    name: description of the fault
    run: makes the fault, runs a command, and describes a bad end; "" for a good one
    """

    name: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Good:
    """Valid bundles, which cases change and restore."""

    encoder: Path
    decoder: Path
    tar: Path


def make(folder: Path) -> Good:
    targets = (small_bundle.ORT, small_bundle.RTX)
    encoder = small_bundle.make(folder / "encoder", targets)
    (folder / "decoder").mkdir()
    return Good(
        encoder / "bundle", generation_bundle.make(folder / "decoder"), encoder / "tiny-1.tar"
    )


def ended(
    arguments: Sequence[str],
    named: Sequence[str] = (),
    accepted: Sequence[int] = (2,),
    data: bytes = b"",
) -> str:
    """Run one command; "" when it ended with an accepted code, in time, without a traceback, with
    one of `named` in what it said (where it was refused)."""
    start = time.monotonic()
    done = CliRunner().invoke(cli, list(arguments), input=data)
    seconds = time.monotonic() - start
    text = done.output
    if done.exit_code not in accepted or "Traceback" in text or "bug here" in text:
        return f"exit {done.exit_code}: {text[-400:]} {done.exception!r:.200}"
    if seconds > SECONDS:
        return f"{seconds:.0f} s"
    if done.exit_code == 2 and named and not any(n in text for n in (*named, "is not UTF-8")):
        return f"names none of {list(named)}: {text[-400:]}"
    return ""


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Restore the file afterwards."""
    data = path.read_bytes()
    try:
        yield
    finally:
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        path.write_bytes(data)


COMMANDS = ("predict", "check", "doctor", "inspect", "compare", "predict")


def command(name: str, bundle: Path) -> list[str]:
    more = {"predict": ["good film"], "compare": [str(bundle)]}
    return [name, str(bundle), *more.get(name, [])]
