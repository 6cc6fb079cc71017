"""Functions of the computing parts take few things, and functions and files are short."""

from __future__ import annotations

from pathlib import Path

import optimizer
from tests.house import facts

PACKAGE = Path(optimizer.__file__).parent
MOST = 6
ROOMS = ("reduce", "compress", "validate")
LINES = 80


def test_no_function_is_longer_than_eighty_lines() -> None:
    long = [
        f"{file.relative_to(PACKAGE)}: {function.name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for function in facts.of(file).functions
        if function.lines >= LINES
    ]
    assert long == []


def test_no_function_of_the_computing_parts_takes_more_than_six_parameters() -> None:
    long = {
        f"{file.relative_to(PACKAGE)}: {function.name}": function.parameters
        for room in ROOMS
        for file in sorted((PACKAGE / room).rglob("*.py"))
        for function in facts.of(file).functions
        if function.name != "__init__" and len(function.parameters) > MOST
    }
    assert long == {}
