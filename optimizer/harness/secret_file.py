"""A secret in a file: read without waiting, and not where others could have put it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from .errors import InputError
from .plain_file import open_regular

LARGEST = 64 << 10  # bytes
WRITE, READ = 0o022, 0o044  # the mode's bits of those who are not its owner


def read_secret(path: Path, warn: Callable[[str], None]) -> str:
    """The text in a file, without space around it. warn: told where others may read it.

    Raises InputError for a file that is missing, empty, not a regular file (a pipe may never end),
    above LARGEST bytes, not UTF-8, or that others may write.
    """
    where, accepted = str(path), "a regular file that holds a token"
    with open_regular(path) as file:
        mode = os.fstat(file.fileno()).st_mode
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise InputError("it is too large", where=where, accepted=f"up to {LARGEST:,} bytes")
    try:
        text = data.decode("utf-8").strip()
    except UnicodeDecodeError as e:
        raise InputError(f"cannot be read ({e})", where=where, accepted=accepted) from None
    if not text:
        raise InputError("it is empty", where=where, accepted=accepted)
    if os.name == "posix" and mode & WRITE:
        raise InputError(
            f"others may write it (mode {stat.S_IMODE(mode):04o})",
            where=where,
            accepted="a file that only its owner writes",
            fix=f"chmod 600 {path}",
        )
    if os.name == "posix" and mode & READ:
        warn(f"others may read {path} (mode {stat.S_IMODE(mode):04o}): chmod 600 keeps it secret")
    return text
