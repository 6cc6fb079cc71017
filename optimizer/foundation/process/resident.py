"""Measure the memory of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATUS = Path("/proc/self/status")
INTERVAL = 0.005  # seconds between samples


def anonymous(usual: int) -> int:
    """Return the bytes of memory that do not belong to a file; `usual` where the system does not
    report them."""
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return usual
    return next((int(n.split()[1]) << 10 for n in lines if n.startswith("RssAnon:")), usual)


@contextmanager
def sampled() -> Iterator[list[int]]:
    """Inside, sample the anonymous memory of this process, in bytes, into the list that is
    yielded."""
    sizes, done = [anonymous(0)], threading.Event()

    def sample() -> None:
        while not done.wait(INTERVAL):
            sizes.append(anonymous(0))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield sizes
    finally:
        done.set()
        thread.join()
