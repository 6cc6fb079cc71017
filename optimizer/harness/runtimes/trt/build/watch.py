"""Watching a build from outside: what is logged, how far it is, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[str, int, int], None]
Messages = list[tuple[str, str]]
SPARSITY = "(Sparsity)"  # what TensorRT puts before a message about kernels for 2:4
PARTS = 1000  # a build's progress is told in thousandths
BEFORE_SLOW = 0.1  # SmolLM2 with RTX 1.7: 3 of 34 s


class Advance:
    """How much of a build is done, from the phases it is inside of.

    A step of an outer phase is as long as the whole of the phases inside it, but for `slow`: the
    phase in which nearly all the time goes and nothing is told, so that what is done before it is
    worth little. What is told never goes back: a phase may end before its last step, and phases
    of one name may follow another.
    """

    def __init__(self, slow: str = "") -> None:
        self.phases: list[list[Any]] = []  # [name, steps, done], the outermost first
        self.reported = 0
        self.slow = slow

    def start(self, phase: str, steps: int) -> int:
        """Go into `phase`; thousandths done."""
        self.phases.append([phase, max(steps, 1), 0])
        return self._thousandths()

    def step(self, phase: str, done: int) -> int:
        """`done` steps of `phase` are; thousandths done."""
        for entry in reversed(self.phases):
            if entry[0] == phase:
                entry[2] = min(done, entry[1])
                break
        return self._thousandths()

    def finish(self, phase: str) -> int:
        """Leave `phase`; thousandths done."""
        self.step(phase, PARTS * PARTS)
        while self.phases:
            if self.phases.pop()[0] == phase:
                break
        if phase == self.slow:
            self.slow = ""
        return self._thousandths()

    def _thousandths(self) -> int:
        share, done = 1.0, 0.0
        for _, steps, finished in self.phases:
            done += share * finished / steps
            share /= steps
        worth = BEFORE_SLOW if self.slow else 1.0
        self.reported = max(self.reported, int(PARTS * worth * min(done, 1.0)))
        return self.reported


def logger(trt: Any) -> Any:
    """A logger that keeps warnings, errors and what is said of sparse kernels, instead of printing
    them: .messages."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.messages: Messages = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.WARNING:
                kind = "warning" if severity == trt.ILogger.Severity.WARNING else "error"
                self.messages.append((kind, message))
            elif SPARSITY in message:
                self.messages.append(("sparsity", message))

    return Log()


def monitor(trt: Any, progress: Progress | None, slow: str = "") -> Any:
    """Tells `progress` how far the whole build is, and stops it once `interrupted` is set."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            super().__init__()
            self.interrupted = False
            self.advance = Advance(slow)
            self.lock = threading.Lock()  # a builder may have threads

        def phase_start(self, phase: str, _parent: str | None, steps: int) -> None:
            with self.lock:
                self._tell(phase, self.advance.start(phase, steps))

        def step_complete(self, phase: str, step: int) -> bool:
            with self.lock:
                self._tell(phase, self.advance.step(phase, step + 1))
            return not self.interrupted

        def phase_finish(self, phase: str) -> None:
            with self.lock:
                outermost = len(self.advance.phases) == 1
                done = self.advance.finish(phase)
                self._tell(phase, PARTS if outermost and not self.interrupted else done)

        def _tell(self, phase: str, done: int) -> None:
            if progress is not None:
                progress(phase, done, PARTS)

    return Monitor()


@contextmanager
def interruptible(watching: Any) -> Iterator[None]:
    """While inside, Ctrl-C sets watching.interrupted: an exception may not cross C++ frames."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is ever interrupted
        return

    def stop(*_: object) -> None:
        watching.interrupted = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
