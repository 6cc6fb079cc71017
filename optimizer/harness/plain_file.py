"""Read a small file that the command line names: a key, a signature, a token."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from .errors import InputError
from .verify import LARGEST

NOT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""A FIFO without a writer is then opened at once, and can be refused."""


def open_regular(path: Path) -> BinaryIO:
    """Raises InputError for what cannot be opened, and for a FIFO or a device, which may never
    end."""
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
    """The bytes of a regular file of at most `largest`. Raises InputError."""
    with open_regular(path) as f:
        data = f.read(largest + 1)
    if len(data) > largest:
        raise InputError(f"more than {largest:,} bytes", where=str(path))
    return data


def readable_by_others(path: Path) -> str:
    """A warning about a secret key that others on this machine may read or replace; "" where only
    its owner may."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "nt" or not mode & 0o077:
        return ""
    return (
        f"warning: {path}: others on this machine may use this secret key (mode {mode:04o}). "
        f"Accepted: 0600. chmod 600 {path}"
    )
