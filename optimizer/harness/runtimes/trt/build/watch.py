"""Watch a build: collect its messages, report its progress, and stop it on Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[str, int, int], None]
Messages = list[tuple[str, str]]
SPARSITY = "(Sparsity)"  # prefix of TensorRT's messages about 2:4 kernels
PARTS = 1000  # progress is reported in thousandths
BEFORE_SLOW = 0.1  # share of the time before the slow phase; SmolLM2 with RTX 1.7: 3 of 34 s


class Advance:
    """Progress of an engine's build by TensorRT, computed from its nested phases.

    A step of an outer phase counts as much as all phases inside it. The phase `slow` takes nearly
    all of the time and reports no steps, so the phases before it share BEFORE_SLOW. Reported
    progress never decreases: a phase may end before its last step, and names may repeat.
    """

    def __init__(self, slow: str = "") -> None:
        self.phases: list[list[Any]] = []  # [name, steps, done], the outermost first
        self.reported = 0
        self.slow = slow

    def start(self, phase: str, steps: int) -> int:
        """Enter a phase of an engine's build; return its progress in thousandths."""
        self.phases.append([phase, max(steps, 1), 0])
        return self._thousandths()

    def step(self, phase: str, done: int) -> int:
        """Set the steps done of a phase of an engine's build; return the progress in
        thousandths."""
        for entry in reversed(self.phases):
            if entry[0] == phase:
                entry[2] = min(done, entry[1])
                break
        return self._thousandths()

    def finish(self, phase: str) -> int:
        """Leave a phase of an engine's build; return the progress in thousandths."""
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
    """Return a logger for TensorRT that collects warnings, errors and messages about sparse kernels
    in .messages."""

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
    """Return a monitor of TensorRT's build that reports progress, and stops the build once
    `interrupted` is set."""

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
    """During an engine's build, make Ctrl-C set watching.interrupted during the `with`, instead of
    raising an exception.

    An exception may not cross C++ frames. Has no effect outside of the main thread, which alone
    receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return

    def stop(*_: object) -> None:
        watching.interrupted = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
