"""Folders that appear under their name whole or not at all, and locks on names."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from optimizer.errors import MachineError, OptimizeError
from optimizer.progress import say


def finish(partial: Path, final: Path) -> None:
    """Make `partial` durable and give it its final name, atomically."""
    for p in [*partial.rglob("*"), partial]:
        if p.is_symlink():
            continue
        fd = os.open(p, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    os.rename(partial, final)
    fd = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """An exclusive lock, released by the kernel if we die. Says so when it has to wait."""
    exclusive = FileLock(path)
    try:
        exclusive.acquire(blocking=False)
    except Timeout:
        say(f"waiting for another run that holds {path}")
        exclusive.acquire()
    try:
        yield
    finally:
        exclusive.release()


@contextmanager
def disk_errors_explained(root: Path, option: str) -> Iterator[None]:
    """A full or read-only disk is the machine's fault, and says what to do.

    option: the command line option that moves `root` elsewhere.
    """
    try:
        yield
    except OptimizeError:
        raise
    except OSError as e:
        kept = "finished steps are kept."
        fixes = {
            errno.ENOSPC: f"Free space, or point {option} at another disk; {kept}",
            errno.EDQUOT: f"Free quota, or point {option} at another disk; {kept}",
            errno.EROFS: f"Point {option} at a writable folder.",
            errno.EACCES: f"Point {option} at a folder you may write to.",
            errno.EPERM: f"Point {option} at a folder you may write to.",
            errno.ENOTDIR: f"A file stands where a folder should; point {option} at a folder.",
            errno.EEXIST: f"A file stands where a folder should; point {option} at a folder.",
        }
        if e.errno in fixes:
            raise MachineError(
                f"{os.strerror(e.errno).lower()}", where=str(e.filename or root), fix=fixes[e.errno]
            ) from e
        raise
