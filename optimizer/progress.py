"""Progress on stderr, so that stdout stays one JSON document under `--json`.

for block in bar(blocks, "compress"):      a bar with an ETA when stderr is a terminal,
    ...                                    one line every ten percent when it is not
say("load: reused")                        one line
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")


def say(message: str) -> None:
    """One line on stderr."""
    print(message, file=sys.stderr, flush=True)


def bar(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Yield from `items` while showing how far along it is.

    `total` is needed when `items` has no length. In a log file (stderr is no terminal) it
    prints at most eleven lines whatever the length, so a 30-layer model does not make
    megabytes of log.
    """
    if total is None:
        total = len(items) if isinstance(items, Sized) else None
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(items, desc=label, total=total, leave=False, dynamic_ncols=True)
        return
    started, shown = time.monotonic(), 0
    for done, item in enumerate(items, start=1):
        yield item
        tenth = 10 * done // total if total else 0
        if tenth > shown:
            shown = tenth
            say(f"{label}: {done}/{total} ({time.monotonic() - started:.0f} s)")
