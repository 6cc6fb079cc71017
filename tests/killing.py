"""Work in forked children, killed at a chosen call."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress

WATCHED = ("open", "os.", "shutil.", "ctypes.", "fcntl.", "tempfile.")


def start(
    work: Callable[[], object],
    kill_at: int | None = None,
    below: str = "",
    watched: tuple[str, ...] = WATCHED,
) -> int:
    """The process id of a child that does `work`, and is killed with SIGKILL when it is about to
    make its `kill_at`-th call that touches files (as Python's audit events tell them).

    below: count those alone that name something below this folder. watched: beginnings of the
    names of the events that count.
    """
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: the test may have threads
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if kill_at is not None:
            left = [kill_at]

            def call() -> None:
                left[0] -= 1
                if left[0] == -1:
                    os.kill(os.getpid(), signal.SIGKILL)

            _watch(call, below, watched)
        work()
        sys.stderr.flush()
        code = 0
    except BaseException:
        with suppress(ValueError):  # `work` may have closed it
            traceback.print_exc()
            sys.stderr.flush()
    finally:
        os._exit(code)


def calls(work: Callable[[], object], below: str = "", watched: tuple[str, ...] = WATCHED) -> int:
    """The number of calls at which `start` could kill a child that does `work`."""
    read, write = os.pipe()

    def counted() -> None:
        made = [0]

        def call() -> None:
            made[0] += 1

        _watch(call, below, watched)
        work()
        os.write(write, str(made[0]).encode())

    assert wait(start(counted)) == 0
    os.close(write)
    with os.fdopen(read) as answer:
        return int(answer.read())


def _watch(call: Callable[[], None], below: str, watched: tuple[str, ...]) -> None:
    """Call `call` before each of the watched calls of this process, until it ends."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(watched) and any(below in str(a) for a in arguments or [""]):
            call()

    sys.addaudithook(hook)


def start_clean(
    work: Callable[..., object], *arguments: object
) -> multiprocessing.context.ForkServerProcess:
    """A child that does the work, in this environment, forked by a process without threads: a
    client with threads of its own (obstore) does not answer in a fork of the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    child = context.Process(target=_in, args=({**os.environ}, work, *arguments))
    child.start()
    return child


def _in(environment: dict[str, str], work: Callable[..., object], *arguments: object) -> None:
    os.environ.clear()
    os.environ.update(environment)
    work(*arguments)


def wait(pid: int) -> int:
    """The child's exit code, -9 when it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
