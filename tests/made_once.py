"""Write equal folders once per run of tests: a tiny model takes half a second to write and load."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any


class Made:
    """Folders of all workers. root: where they lie; None outside a run of tests, where each call
    makes its own."""

    root: Path | None = None


@contextmanager
def locked(made: Path) -> Iterator[None]:
    """Make the other workers that make the same file or folder wait until this one made it."""
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def once(make: Callable[..., Any]) -> Callable[..., Path]:
    """Wrap make(folder, ...): for arguments that were there before, copy the folder made then."""

    @wraps(make)
    def copied(folder: Path, *arguments: Any, **options: Any) -> Path:
        if Made.root is None:
            make(folder, *arguments, **options)
            return folder
        key = repr((make.__module__, make.__name__, arguments, sorted(options.items())))
        Made.root.mkdir(exist_ok=True)
        made = Made.root / hashlib.sha256(key.encode()).hexdigest()
        complete = made.with_suffix(".complete")
        with locked(made):
            if not complete.exists():
                shutil.rmtree(made, ignore_errors=True)
                make(made, *arguments, **options)
                complete.touch()
        shutil.copytree(made, folder, dirs_exist_ok=True)
        return folder

    return copied
