"""Child Python process that ends with its parent, even if the parent is killed with SIGKILL.

On Linux the kernel kills the child (prctl PR_SET_PDEATHSIG), even inside a library. Elsewhere a
thread of the child waits for the end of a pipe that only the parent holds open.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1


def run_python(
    code: str, folder: Path, *, show_errors: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run code in a child process of Python; return its exit code and output.

    The process ends with this one, and has no usable standard input.

    folder: working folder
    show_errors: True passes its standard error through instead of capturing it
    """
    places = [os.path.abspath(place) for place in sys.path]  # "" is our folder, not the child's
    script = (
        f"import sys; sys.path[:0] = {places!r}\n"
        f"from {__name__} import end_with_parent\nend_with_parent({os.getpid()})\n{code}"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=pipe,
        stdout=pipe,
        stderr=None if show_errors else pipe,
        text=True,
        cwd=folder,
    ) as child:
        # communicate() would close the child's input, which must stay open while we live
        lifeline, child.stdin = child.stdin, None
        assert lifeline is not None
        with lifeline:
            try:
                output, errors = child.communicate()
            except BaseException:  # an interrupt
                child.kill()
                raise
    return subprocess.CompletedProcess(child.args, child.returncode, output, errors)


def end_with_parent(parent: int) -> None:
    """Let this process, started by `run_python`, end when its parent ends. parent: process id"""
    if not end_by_signal(parent):
        end_by_pipe()


def end_by_signal(parent: int) -> bool:
    """Have the kernel kill this process when the thread that started it ends.

    Returns False on systems that cannot. parent: process id of the parent
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        return False
    if os.getppid() != parent:  # it had ended before we asked
        os._exit(1)
    return True


def end_by_pipe() -> None:
    """End this child process when the other end of its standard input is closed."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
