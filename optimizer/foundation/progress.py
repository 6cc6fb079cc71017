"""Progress on stderr, so that stdout stays one JSON document under `--json`.

for block in bar(blocks, "compress"):      a bar with an ETA when stderr is a terminal,
    ...                                    a line with an ETA every ten percent when it is not
with meter("build", total) as report:       report(done) from a callback, shown alike
say("load: reused")                        one line
show(text)                                 the command's result, on stdout
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TextIO, TypeVar

from optimizer.foundation.errors import MachineError
from optimizer.foundation.process import busy
from optimizer.harness.shown import escape_line, escape_lines, scrub

T = TypeVar("T")
UNREAD = 128 + 13  # the exit code of a process that SIGPIPE ended


def say(message: str) -> None:
    """Print one line on stderr, with secrets and control characters removed (harness/shown.py).

    The process ends, as shell tools do, when the reader has closed the pipe (`2>&1 | head`); it
    continues without a log when the log's disk is full.
    """
    try:
        print(escape_line(scrub(message)), file=sys.stderr, flush=True)
    except BrokenPipeError:
        leave(sys.stdout)
        leave(sys.stderr)
        raise SystemExit(UNREAD) from None
    except OSError:
        leave(sys.stderr)


def show(text: str) -> None:
    """Print a command's result on stdout, with secrets and control characters removed
    (harness/shown.py).

    A closed pipe (`| head`) is not an error. Raises MachineError where stdout cannot be written,
    such as a file on a full disk.
    """
    try:
        print(escape_lines(scrub(text)), flush=True)
    except BrokenPipeError:
        leave(sys.stdout)
    except OSError as e:
        leave(sys.stdout)
        raise MachineError(
            f"the result cannot be written ({os.strerror(e.errno or 0).lower()})",
            where="standard output",
            fix="Free space on its disk, or send it elsewhere; finished steps are kept.",
        ) from e


def leave(stream: TextIO) -> None:
    """Discard further progress lines and output to a stream whose reader is gone, including at
    interpreter exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def bar(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Yield from `items` and show the progress on stderr.

    label: text in front of the progress
    total: number of items, where `items` has no length

    A log file (stderr is not a terminal) gets at most eleven lines.
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
            say(f"{label}: {done}/{total} ({_spent(started, done, total or 0)})")


def _spent(started: float, done: int, total: int) -> str:
    """Write for a progress line the seconds since `started`, and the seconds left at the measured
    rate."""
    spent = time.monotonic() - started
    left = spent * (total - done) / done
    return f"{spent:.0f} s, about {left:.0f} s left" if done < total else f"{spent:.0f} s"


@contextmanager
def meter(label: str, total: int, before: int = 0) -> Iterator[Callable[..., None]]:
    """Yield report(done), or report(done, new_total), for work that reports its own progress.

    A terminal shows a bar with an ETA, a log a line every ten percent. `done` never decreases.

    before: items done by an earlier run, excluded from the ETA
    """
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(
            desc=label, total=total, initial=before, leave=False, dynamic_ncols=True
        ) as shown:

            def show_bar(done: int, now: int | None = None) -> None:
                shown.total = now or shown.total
                shown.update(done - shown.n)

            yield show_bar
        return
    started, reported = time.monotonic(), 10 * before // total

    def report(done: int, now: int | None = None) -> None:
        nonlocal reported, total
        if now is not None and now != total:
            total, reported = now, 10 * (done - 1) // now
        tenth = 10 * done // total
        if tenth > reported and done > before:
            reported = tenth
            spent = _spent(started, done - before, total - before)
            say(f"{label}: {10 * tenth} % ({spent})")

    yield report


@contextmanager
def overdue(label: str, predicted: float = 0.0, patience: float = 60.0) -> Iterator[None]:
    """Inside, print a line when the work takes longer than predicted: the time so far, and the load
    of this machine, which predictions ignore. Each further line comes after twice the time.

    label: text in front of the line
    predicted: seconds; 0: no prediction
    patience: seconds beyond the prediction before the first line
    """
    done = threading.Event()

    def watch() -> None:
        after = max(2 * predicted, predicted + patience)
        started = time.monotonic()
        while not done.wait(started + after - time.monotonic()):
            load = busy.describe()
            parts = [
                f"predicted {predicted:.0f} s for a quiet machine" if predicted else "",
                f"this machine is busy, {load}" if load else "",
            ]
            say("; ".join(filter(None, (f"{label}: {after:.0f} s so far", *parts))))
            after *= 2

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
