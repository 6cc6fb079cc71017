"""Temporary folders, which a later run removes if their process was killed.

    <parent>/optimize-<purpose>-<random>          mode 700
    <parent>/optimize-<purpose>-<random>.owner    exists before and after the folder; holds the
                                                  machine's name, and is locked while the process
                                                  that made it lives

A process that makes a folder first removes abandoned ones, whose owner file is no longer locked.
It never removes a folder of a living process, of another user or machine, behind a link, or one
without an owner file.
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
    """Raise MachineError if no folder for temporary files is writable; some imports need it."""
    with _explain_refusals():
        tempfile.gettempdir()


@contextmanager
def make_temporary_folder(purpose: str) -> Iterator[Path]:
    """Make an empty folder below TMPDIR, removed at the end. Raises MachineError on failure."""
    with ExitStack() as stack:
        with _explain_refusals():
            parent = Path(tempfile.gettempdir())
            folder = stack.enter_context(make_private_folder(parent, f"optimize-{purpose}"))
        yield folder


@contextmanager
def _explain_refusals() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise MachineError(
            f"no folder for temporary files can be made ({e.strerror or e})",
            where=str(e.filename or tempfile.tempdir or "TMPDIR"),
            fix="Set TMPDIR to a folder you may write to, on a disk with free space.",
        ) from e


@contextmanager
def make_private_folder(parent: Path, name: str) -> Iterator[Path]:
    """Make an empty folder in `parent` for this process alone, removed at the end. Raises OSError.

    name: prefix of its name, "optimize-<purpose>" or ".optimize-<purpose>"
    """
    _clear_abandoned(parent)
    folder, owner = _open_owner(parent, name)
    try:
        with owner:
            folder.mkdir(mode=0o700)
            yield folder
    finally:
        _remove(folder)


def _open_owner(parent: Path, name: str) -> tuple[Path, BinaryIO]:
    """Choose a new temporary folder below `parent`, and open and lock its owner file; return both.

    Another process may take the file for an abandoned one before it is locked; then another name is
    tried. If files cannot be locked, no machine is written, and no process removes the folder.
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
    """Return this machine's name: other machines may not see a lock on a shared disk."""
    return f"{platform.node()}\n".encode()


def _clear_abandoned(parent: Path) -> None:
    try:
        names = [OWNER.fullmatch(name) for name in os.listdir(parent)]
    except OSError:  # the caller gets the same error
        return
    for name in filter(None, names):
        with suppress(OSError):
            _clear_if_abandoned(parent / name[1])


def _clear_if_abandoned(folder: Path) -> None:
    """Remove a temporary folder whose process has ended.

    Raises OSError if its owner file must not be opened by this user.
    """
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
    """Remove a temporary folder, then the file that names its owner; what cannot be removed stays
    for a later run."""
    with suppress(OSError):
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and _is_own(status):
            shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        _owner_of(folder).unlink(missing_ok=True)
