"""Exclusive lock on an open file; the system releases it when the process ends in any way.
`try_lock` returns False while another process holds the lock; `wait_lock` waits for it."""

from __future__ import annotations

import sys
from typing import Any

if sys.platform == "win32":
    import msvcrt
    import time

    def try_lock(f: Any) -> bool:
        f.seek(0)
        try:
            msvcrt.locking(f.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def wait_lock(f: Any) -> None:
        while not try_lock(f):
            time.sleep(0.2)

else:
    import fcntl

    def try_lock(f: Any) -> bool:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait_lock(f: Any) -> None:
        fcntl.flock(f, fcntl.LOCK_EX)
