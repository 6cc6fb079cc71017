"""A checkpoint's own code cannot end this program, or pass for the user's Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimizer.foundation.errors import CheckpointError
from optimizer.model.checkpoint.own_code import contain

FILE = "/cache/transformers_modules/model/mine.py"  # where transformers imports a copy from


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """As in a terminal; what runs in the background has interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "statement", ["raise KeyboardInterrupt", "raise SystemExit(0)", "raise GeneratorExit"]
)
def test_code_that_ends_the_program_is_named(statement: str) -> None:
    with (
        pytest.raises(CheckpointError, match=r"^model/mine\.py: .* tried to end"),
        contain(Path("model")),
    ):
        exec(compile(statement, FILE, "exec"))


def test_an_interrupt_of_the_users_stays_one() -> None:
    source = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsum(range(10**6))"
    with pytest.raises(KeyboardInterrupt), contain(Path("model")):
        exec(compile(source, FILE, "exec"))
    with pytest.raises(KeyboardInterrupt), contain(Path("model")):
        raise KeyboardInterrupt


def test_interrupts_are_afterwards_what_they_were() -> None:
    before = signal.getsignal(signal.SIGINT)
    with contain(Path("model")):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
