"""Names say what a thing is, not how it came about: `candidate`, not `found`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "optimizer"
REFUSED = frozenset({"found", "made", "asked", "given", "said", "told", "wanted", "held"})
FILES = sorted(PACKAGE.rglob("*.py"))


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of every variable, parameter, field, attribute and function that is bound."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield name, node.lineno


def refused(source: str) -> list[str]:
    return [
        f"line {line}: {name}"
        for name, line in bound_names(ast.parse(source))
        if name.strip("_") in REFUSED
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_every_name_says_what_the_thing_is(file: Path) -> None:
    assert refused(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "made: int",
        "def f(given): pass",
        "def f(*, _wanted=None): pass",
        "def asked(): pass",
        "class A:\n    held: int",
        "self.told = 0",
        "[said for said in x]",
        "import x as made",
        "try: pass\nexcept E as told: pass",
        "match x:\n    case [held]: pass",
    ],
)
def test_a_name_that_does_not_is_refused_wherever_it_is_bound(source: str) -> None:
    assert refused(source)


def test_a_name_that_does_is_not() -> None:
    assert refused("missing_keys = [f(found=1) for candidate in found]") == []
