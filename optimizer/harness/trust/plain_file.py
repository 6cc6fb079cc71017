"""Read a file that the command line names: a key, a signature, a token, texts."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from pathlib import Path

from ..errors import InputError
from .verify import LARGEST

NOT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags that open a FIFO without a writer at once, so that it can be refused."""
WRITE, OTHERS = 0o022, 0o077  # mode bits: write, and any access, by others than the owner


def open_regular(path: Path) -> io.BufferedReader:
    """Open an untrusted path for reading, only if it is a regular file.

    Raises InputError if it cannot be opened, also for a FIFO or a device, which may never end.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | NOT_WAITING), "rb")
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise InputError(f"cannot be read ({reason})", where=str(path)) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise InputError("not a regular file", where=str(path), accepted="a regular file")
    return file


def read(path: Path, largest: int = LARGEST) -> bytes:
    """Read an untrusted path: return the bytes of a regular file.

    Raises InputError if it cannot be read, or has more than `largest` bytes.
    """
    with open_regular(path) as file:
        return _read_at_most(file, path, largest)


def read_secret(
    path: Path, warn: Callable[[str], None], largest: int = LARGEST, *, shared: bool = False
) -> bytes:
    """Return the bytes of a file with a secret, such as a key or a token.

    warn: receives a warning if others on this machine may use the file
    shared: True accepts a file that others may write, with a warning: CI systems make such files of
        their secrets

    Raises InputError as `read` does, and for a file that others may write.
    """
    with open_regular(path) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode) if os.name == "posix" else 0
        if mode & WRITE and not shared:
            raise InputError(
                f"others on this machine may write it (mode {mode:04o})",
                where=str(path),
                accepted="a file that only its owner may write",
                fix=f"chmod 600 {path}",
            )
        if mode & OTHERS:
            warn(
                f"{path}: others on this machine may use this secret (mode {mode:04o}). "
                f"Accepted: 0600. chmod 600 {path}"
            )
        return _read_at_most(file, path, largest)


def _read_at_most(file: io.BufferedReader, path: Path, largest: int) -> bytes:
    data = file.read(largest + 1)
    if len(data) > largest:
        raise InputError(f"more than {largest:,} bytes", where=str(path))
    return data
