"""Folders that appear under their name whole or not at all, and locks on names."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from optimizer.foundation.errors import MachineError, of_the_system
from optimizer.foundation.progress import say
from optimizer.harness.errors import ExplainedError

AT_FDCWD, RENAME_EXCHANGE = -100, 2
UNLOCKABLE = (errno.ENOLCK, errno.EOPNOTSUPP)  # as NFS says it; filelock itself looks for ENOSYS
LOCK_TEXT = re.compile(rb"\d+\n|filelock/|\Z")
"""How a lock file begins: it is empty, or where files cannot be locked it names its holder."""


def finish(partial: Path, final: Path) -> None:
    """Make `partial` durable and give it its final name, atomically."""
    _sync_all(partial)
    os.rename(partial, final)
    sync(final.parent)


def replace(new: Path, final: Path) -> None:
    """As `finish` where nothing has the name; else what has it is afterwards at `new`.

    The two exchange their names in one step where the system can (Linux, most file systems).
    Elsewhere, killed between two renames, nothing has the name until `restore` gives it back.
    """
    _sync_all(new)
    if not os.path.lexists(final):
        os.rename(new, final)
    elif not _exchange(new, final):
        old = set_aside(final)
        os.rename(final, old)
        try:
            os.rename(new, final)
        except OSError:
            os.rename(old, final)
            raise
        os.rename(old, new)
    sync(final.parent)


def write(path: Path, data: bytes, partial: Path | None = None) -> None:
    """Write a file that a reader sees with its old bytes or with these, whenever we are killed.

    partial: where the bytes are until then, on the same disk; nobody else may write there.
    """
    partial = partial or path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def restore(final: Path) -> None:
    """Mend a `replace` that was killed between its renames."""
    old = set_aside(final)
    if os.path.lexists(old) and not os.path.lexists(final):
        os.rename(old, final)


def set_aside(final: Path) -> Path:
    """Where `replace` keeps what had the name, for an instant."""
    return final.with_name(f".{final.name}.old")


def remove(path: Path) -> None:
    """Remove a folder, a file or a link (never what it leads to), if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have the disk hold a file's bytes, or a folder's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_all(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            sync(path)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where that cannot be done."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):  # a C library of before 2018
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """An exclusive lock, released by the kernel if we die. Says so when it has to wait.

    Where the file system has no such locks, the file names its holder's process, and is removed by
    the next run on that machine when there is no such process. Raises MachineError when something
    else than a lock has the name.
    """
    _check_lock_file(path)
    exclusive: BaseFileLock = FileLock(path)
    try:
        try:
            exclusive.acquire(blocking=False)
        except OSError as e:
            if e.errno not in UNLOCKABLE:
                raise
            exclusive = SoftFileLock(path.with_name(f"{path.name}.held"))
            exclusive.acquire(blocking=False)
    except Timeout:
        by_name = isinstance(exclusive, SoftFileLock)
        no_run = "; delete it if no run is left on any machine" if by_name else ""
        say(f"waiting for another run that holds {exclusive.lock_file}{no_run}")
        exclusive.acquire()
    try:
        yield
    finally:
        exclusive.release()


def _check_lock_file(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            with path.open("rb") as f:
                if LOCK_TEXT.match(f.read(16)):
                    return
    except OSError:  # there is none yet, or it cannot be opened, which acquiring it will say
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFREG: "another file"}
    raise MachineError(
        f"{kinds.get(stat.S_IFMT(mode), 'something else')} stands where a lock file goes",
        where=str(path),
        fix="Move it away.",
    )


@contextmanager
def disk_errors_explained(root: Path, option: str) -> Iterator[None]:
    """A full or read-only disk is the machine's fault, and says what to do (errors.of_the_system).

    option: the command line option that moves `root` elsewhere.
    """
    try:
        yield
    except ExplainedError:
        raise
    except (OSError, RuntimeError, ValueError) as e:
        explained = of_the_system(e, root, option)
        if explained is None:
            raise
        raise explained from e
