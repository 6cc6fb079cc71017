"""Children end with their parent, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from optimizer.harness.process.child import run_python

ROOT = Path(__file__).parents[3]


def until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def lives(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_says_what_it_computed_and_how_it_ended(tmp_path: Path) -> None:
    done = run_python("import os, sys; print(os.getcwd()); sys.exit(3)", tmp_path)
    assert (done.returncode, done.stdout.strip()) == (3, str(tmp_path.resolve()))


def test_a_child_reads_nothing_from_our_input(tmp_path: Path) -> None:
    done = run_python("print('x' * 200_000); 1 / 0", tmp_path)
    assert (len(done.stdout), done.returncode) == (200_001, 1)
    assert "ZeroDivisionError" in done.stderr


WITHOUT_SIGNAL = """
import ctypes
from optimizer.harness.process.child import end_by_pipe
ctypes.CDLL(None).prctl(1, 0)  # takes back what end_with_parent asked of the kernel
end_by_pipe()
"""
WAITS = """
import os, pathlib, time
pathlib.Path("pid.new").write_text(str(os.getpid()))
os.rename("pid.new", "pid")
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("code", [WAITS, WITHOUT_SIGNAL + WAITS], ids=["signal", "pipe"])
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path, code: str) -> None:
    parent = (
        "import pathlib\nfrom optimizer.harness.process.child import run_python\n"
        f"run_python({code!r}, pathlib.Path({str(tmp_path)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT) as process:
        started = until((tmp_path / "pid").exists)
        child = int((tmp_path / "pid").read_text()) if started else 0
        lived = lives(child)
        os.kill(process.pid, signal.SIGKILL)
    assert lived
    assert until(lambda: not lives(child))


@pytest.mark.skipif(sys.platform != "linux", reason="what only Linux has")
def test_a_child_whose_parent_ended_before_it_asked_ends_at_once() -> None:
    code = "from optimizer.harness.process.child import end_with_parent as end\n"
    code += "end(1 << 30); print('on')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
