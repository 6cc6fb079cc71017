"""Folders that appear under their name complete or not at all, and locks on names."""

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
from tempfile import TemporaryFile

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from optimizer.foundation.errors import MachineError, explain_system_error
from optimizer.foundation.progress import say
from optimizer.harness.errors import ExplainedError

AT_FDCWD, RENAME_EXCHANGE = -100, 2
FICLONE = 0x40049409  # ioctl of btrfs, XFS and others
UNLOCKABLE = (errno.ENOLCK, errno.EOPNOTSUPP)  # NFS without locks; filelock itself handles ENOSYS
LOCK_TEXT = re.compile(rb"\d+\n|filelock/|\Z")
"""Start of a lock file: empty, or its holder where files cannot be locked."""


def finish(partial: Path, final: Path) -> None:
    """Flush the folder `partial` to disk and rename it to `final`, atomically."""
    _sync_all(partial)
    os.rename(partial, final)
    sync(final.parent)


def replace(new: Path, final: Path) -> None:
    """Give the folder `new` the name `final`, in place of an older folder with that name.

    On Linux, with most file systems, this is one atomic step. Elsewhere a kill between two renames
    leaves no `final` until `restore` puts it back.
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
    """Write a file atomically: a reader sees the old bytes or the new ones, even after a kill.

    partial: temporary file on the same disk that no other process writes; None: a name beside
        `path`
    """
    partial = partial or path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def copy(source: Path, target: Path) -> None:
    """Copy a file's bytes; where the file system can, both share their blocks until one is written.

    Never a hard link: readers of ONNX refuse weights in a file of several names.
    """
    if not clone(source, target):
        shutil.copyfile(source, target)


def clone(source: Path, target: Path) -> bool:
    """Make `target` a copy of `source` that shares its blocks; False, with no file left, where the
    file system cannot."""
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        with source.open("rb") as f, target.open("wb") as to:
            fcntl.ioctl(to.fileno(), FICLONE, f.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True


def restore(final: Path) -> None:
    """Complete a `replace` that was killed between its two renames."""
    old = set_aside(final)
    if os.path.lexists(old) and not os.path.lexists(final):
        os.rename(old, final)


def set_aside(final: Path) -> Path:
    """Return the temporary name that `replace` gives the old folder."""
    return final.with_name(f".{final.name}.old")


def remove(path: Path) -> None:
    """Remove a folder, a file or a link (never its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush to disk the bytes of a file, or the names in a folder."""
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
    """Exchange two names in one atomic step; return False where the system has no such call."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):  # a C library of before 2018
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Inside, hold an exclusive lock, which the kernel releases if this process dies. Prints a line
    when it has to wait.

    On a file system without locks the file contains the name of its holder's process; the next run
    on that machine removes it when that process is gone. Raises MachineError where `path` is a file
    of another kind.
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
    except OSError:  # it does not exist yet, or acquiring it will raise the error
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFREG: "another file"}
    raise MachineError(
        f"{kinds.get(stat.S_IFMT(mode), 'something else')} stands where a lock file goes",
        where=str(path),
        fix="Move it away.",
    )


@contextmanager
def explain_disk_errors(root: Path, option: str) -> Iterator[None]:
    """Inside, turn errors of the machine, such as a full disk, into errors with a fix
    (errors.explain_system_error).

    option: command line option that moves `root` elsewhere
    """
    try:
        yield
    except ExplainedError:
        raise
    except (OSError, RuntimeError, ValueError) as e:
        explained = explain_system_error(e, root, option)
        if explained is None:
            raise
        raise explained from e


def check_writable(folder: Path, option: str) -> None:
    """Create `folder` and a file in it, which is removed. Raises MachineError where that fails.

    option: command line option that moves `folder` elsewhere
    """
    with explain_disk_errors(folder, option):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            TemporaryFile(dir=folder).close()
        except OSError as e:
            e.filename = str(folder)  # in place of the temporary file's
            raise
