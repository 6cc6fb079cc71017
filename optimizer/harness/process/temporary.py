"""Temporary folders that the next run removes when a kill left them.

    <parent>/optimize-<purpose>-<random>          mode 700
    <parent>/optimize-<purpose>-<random>.owner    there before the folder is and after it was; says
                                                  on which machine, and is locked for as long as
                                                  the process that made it lives

Whoever makes one first removes those whose owner is dead, told by the lock, which the system
releases with the process: never one of a living process, of another user or machine, one behind a
link, or a folder that only has a name like ours.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import MachineError
from .file_lock import try_lock

OWNER = re.compile(r"(\.?optimize-[a-z]+-[0-9a-f]{16})\.owner")


def check_place() -> None:
    """Raises MachineError where the system has no place for temporary files. Libraries want one,
    too, as soon as they are imported."""
    with _refusals_explained():
        tempfile.gettempdir()


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """An empty folder where the system keeps temporary files (TMPDIR), removed at the end.

    Raises MachineError where none can be made.
    """
    with ExitStack() as stack:
        with _refusals_explained():
            parent = Path(tempfile.gettempdir())
            folder = stack.enter_context(private_folder(parent, f"optimize-{purpose}"))
        yield folder


@contextmanager
def _refusals_explained() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise MachineError(
            f"no folder for temporary files can be made ({e.strerror or e})",
            where=str(e.filename or tempfile.tempdir or "TMPDIR"),
            fix="Set TMPDIR to a folder you may write to, on a disk with free space.",
        ) from e


@contextmanager
def private_folder(parent: Path, name: str) -> Iterator[Path]:
    """An empty folder in `parent` that no other process uses; removed at the end.

    name: what its name begins with, "optimize-<purpose>" or ".optimize-<purpose>". Raises OSError.
    """
    _clear_abandoned(parent)
    folder, owner = _new_owner(parent, name)
    try:
        with owner:
            folder.mkdir(mode=0o700)
            yield folder
    finally:
        _remove(folder)


def _new_owner(parent: Path, name: str) -> tuple[Path, BinaryIO]:
    """The path of a folder to make, and its owner's file, open.

    Another process may take the file for an abandoned one before it is locked. It then holds the
    lock, or has removed the file, and another name is tried. Where files cannot be locked it says
    no machine, and nobody else removes it.
    """
    while True:
        folder = parent / f"{name}-{secrets.token_hex(8)}"
        owner = _owner_of(folder).open("xb", buffering=0)
        try:
            if not try_lock(owner) or os.fstat(owner.fileno()).st_nlink == 0:
                owner.close()
                continue
            owner.write(_machine())
        except OSError:
            pass
        return folder, owner


def _owner_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.owner")


def _machine() -> bytes:
    """This machine's name: a lock on a shared disk may be unknown to the others."""
    return f"{platform.node()}\n".encode()


def _clear_abandoned(parent: Path) -> None:
    try:
        names = [OWNER.fullmatch(name) for name in os.listdir(parent)]
    except OSError:  # the caller will see why
        return
    for name in filter(None, names):
        with suppress(OSError):
            _clear_if_abandoned(parent / name[1])


def _clear_if_abandoned(folder: Path) -> None:
    """Raises OSError for what cannot be opened, read or locked: it is not ours to remove."""
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(_owner_of(folder), flags), "r+b", buffering=0) as owner:
        if not _is_own(os.fstat(owner.fileno())) or not try_lock(owner):
            return
        text = owner.read(1024)
        if not text:  # killed before it had a folder
            _owner_of(folder).unlink()
    if text == _machine():
        _remove(folder)


def _is_own(status: os.stat_result) -> bool:
    return sys.platform == "win32" or status.st_uid == os.getuid()


def _remove(folder: Path) -> None:
    """The folder, then its owner; where files cannot go, it stays for a later run to try again."""
    with suppress(OSError):
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and _is_own(status):
            shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        _owner_of(folder).unlink(missing_ok=True)
