"""Facts of a source file that several tests read, from one parse of it per process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Function(NamedTuple):
    """lines: those after its first one. parameters: names, without self and cls."""

    name: str
    lines: int
    parameters: tuple[str, ...]


class Facts(NamedTuple):
    """imports: (statement, True for one under TYPE_CHECKING), also inside functions.
    bound: (name, line) of every variable, parameter, field, attribute and function."""

    imports: tuple[tuple[ast.Import | ast.ImportFrom, bool], ...]
    functions: tuple[Function, ...]
    bound: tuple[tuple[str, int], ...]


def read(source: str) -> Facts:
    """Parse one file's text."""
    nodes = list(ast.walk(ast.parse(source)))
    for_types = {
        id(inner)
        for node in (nodes if "TYPE_CHECKING" in source else ())
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    imports = (n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom))
    functions = (n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return Facts(
        tuple((node, id(node) in for_types) for node in imports),
        tuple(map(_function, functions)),
        tuple(_bound(nodes)),
    )


@cache
def of(file: Path) -> Facts:
    """Facts of a file."""
    return read(file.read_text(encoding="utf-8"))


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = tuple(a.arg for a in arguments if a.arg not in ("self", "cls"))
    return Function(node.name, (node.end_lineno or 0) - node.lineno, names)


def _bound(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield name, node.lineno
