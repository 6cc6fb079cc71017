"""Functions of the computing parts take few things, and functions and files are short."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import optimizer

PACKAGE = Path(optimizer.__file__).parent
MOST = 6
FILES = sorted(
    f for part in ("reduce", "compress", "validate") for f in (PACKAGE / part).rglob("*.py")
)
LINES = 80


def test_no_function_is_longer_than_eighty_lines() -> None:
    long = [
        f"{file.relative_to(PACKAGE)}: {node.name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= LINES
    ]
    assert long == []


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.name}")
def test_no_function_takes_more_than_six_parameters(file: Path) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = {
        node.name: len(names)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, functions) and node.name != "__init__"
        for arguments in [node.args]
        for names in [[*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
        if len([a for a in names if a.arg not in ("self", "cls")]) > MOST
    }
    assert long == {}
