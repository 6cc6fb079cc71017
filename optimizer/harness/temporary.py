"""Temporary folders that the next run removes when a kill left them.

    <parent>/optimize-<purpose>-<random>/      mode 700
        owner    the machine's name; locked for as long as the process that made it lives
        files/   what the caller gets

Whoever makes one first removes those whose owner is dead, told by the lock, which the system
releases with the process: never one of a living process, of another user or machine, one behind a
link, or a folder that only has a name like ours.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from .errors import MachineError
from .file_lock import try_lock

PREFIX = "optimize-"
OWNER, FILES = "owner", "files"


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """An empty folder where the system keeps temporary files (TMPDIR), removed at the end.

    Raises MachineError where none can be made.
    """
    with ExitStack() as stack:
        try:
            parent = Path(tempfile.gettempdir())
            folder = stack.enter_context(private_folder(parent, f"{PREFIX}{purpose}-"))
        except OSError as e:
            raise MachineError(
                f"no folder for temporary files can be made ({e.strerror or e})",
                where=str(e.filename or tempfile.tempdir or "TMPDIR"),
                fix="Set TMPDIR to a folder you may write to, on a disk with free space.",
            ) from e
        yield folder


@contextmanager
def private_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """An empty folder below a new one of `parent` that no other process uses; removed at the end.

    prefix: of its name; begins with "optimize-" or ".optimize-". Raises OSError.
    """
    _clear_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with (folder / OWNER).open("xb", buffering=0) as owner:
            # Locked before it says whose it is, and removed by others only if it says so: there is
            # no instant at which a new folder could be taken for an abandoned one. Where files
            # cannot be locked it says nothing, and others leave it alone.
            with suppress(OSError):
                if try_lock(owner):
                    owner.write(_machine())
            (folder / FILES).mkdir()
            yield folder / FILES
    finally:
        _remove(folder)


def _machine() -> bytes:
    """This machine's name: a lock on a shared disk may be unknown to the others."""
    return f"{platform.node()}\n".encode()


def _clear_abandoned(parent: Path) -> None:
    try:
        with os.scandir(parent) as entries:
            folders = [Path(e.path) for e in entries if _may_be_ours(e)]
    except OSError:  # the caller will see why
        return
    for folder in folders:
        with suppress(OSError):
            _clear_if_abandoned(folder)


def _may_be_ours(entry: os.DirEntry[str]) -> bool:
    if not entry.name.removeprefix(".").startswith(PREFIX):
        return False
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:  # gone meanwhile
        return False
    mine = sys.platform == "win32" or status.st_uid == os.getuid()
    return mine and entry.is_dir(follow_symlinks=False)


def _clear_if_abandoned(folder: Path) -> None:
    """Raises OSError for what cannot be opened, read or locked: it is not ours to remove."""
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(folder / OWNER, flags), "r+b") as owner:
        if owner.read(1024) != _machine() or not try_lock(owner):
            return
    _remove(folder)


def _remove(folder: Path) -> None:
    """Where the files cannot go, the owner stays, so that a later run tries again."""
    shutil.rmtree(folder / FILES, ignore_errors=True)
    if not (folder / FILES).exists():
        shutil.rmtree(folder, ignore_errors=True)
