"""A function of the computing part takes few things, each with a name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import optimizer

MOST = 6
FILES = sorted((Path(optimizer.__file__).parent / "compress").rglob("*.py"))


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
