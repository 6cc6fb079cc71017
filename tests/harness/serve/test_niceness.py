"""Which threads of a server give way to which."""

import sys
from pathlib import Path

import pytest

from optimizer.harness.serve.niceness import NICEST
from tests.harness.serve.test_command import started

NICENESS = 17  # the place of a thread's in /proc/PID/task/TID/stat after its name: proc(5)


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is the whole process's elsewhere")
def test_every_thread_that_computes_for_the_model_is_nicer_than_the_event_loop(
    bundle: Path,
) -> None:
    def niceness(thread: Path) -> int:
        text = (thread / "stat").read_text()
        return int(text.rpartition(")")[2].split()[NICENESS - 1])

    process, _, _ = started(bundle, "--model-nice", "7", "--threads", "2")
    try:
        tasks = Path(f"/proc/{process.pid}/task")
        own = niceness(tasks / str(process.pid))
        others = [niceness(t) - own for t in tasks.iterdir() if t.name != str(process.pid)]
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()
    # what opened the model, what runs it, and its pool of two, of which the caller is one
    assert others.count(min(7, NICEST - own)) >= 3
