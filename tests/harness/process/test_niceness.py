"""Niceness and scheduling policy of a server's threads."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from optimizer.harness.process.niceness import NICEST
from tests.harness.commands.test_serve import started

NICENESS = 17  # the place of a thread's in /proc/PID/task/TID/stat after its name: proc(5)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="niceness is the whole process's elsewhere"
)


def of_threads(bundle: Path, nice: str, read: Callable[[int], int]) -> tuple[int, list[int]]:
    """`read` of the event loop's thread, and of each other thread of the server."""
    process, _, _ = started(bundle, "--model-nice", nice, "--threads", "2")
    try:
        threads = [int(t.name) for t in Path(f"/proc/{process.pid}/task").iterdir()]
        return read(process.pid), [read(t) for t in threads if t != process.pid]
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


THREADS = 3  # what opened the model, what runs it, and its pool of two, of which one is the caller


def test_every_thread_that_computes_for_the_model_is_nicer_than_the_event_loop(
    bundle: Path,
) -> None:
    def niceness(thread: int) -> int:
        text = Path(f"/proc/{thread}/stat").read_text()
        return int(text.rpartition(")")[2].split()[NICENESS - 1])

    own, others = of_threads(bundle, "7", niceness)
    assert others.count(min(own + 7, NICEST)) >= THREADS


def test_idle_leaves_the_model_what_nothing_else_wants(bundle: Path) -> None:
    own, others = of_threads(bundle, "idle", os.sched_getscheduler)
    assert own != os.SCHED_IDLE
    assert others.count(os.SCHED_IDLE) >= THREADS
