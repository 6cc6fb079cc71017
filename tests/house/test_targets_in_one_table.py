"""Facts about a runtime stand in its records; its name is compared nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimizer.harness.runtimes.table import RUNTIMES
from optimizer.targets import TARGETS

ROOT = Path(__file__).parents[2] / "optimizer"
RECORDS = {"targets/__init__.py", "recipe/targets.py"}  # the table, and the sections it names
FOLDERS = (
    *("pipeline.py", "commands", "checks", "targets", "lower", "package", "validate"),
    *("recipe", "export"),
)
FILES = sorted(
    file.relative_to(ROOT).as_posix()
    for place in FOLDERS
    for file in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
)
NAMES = {*TARGETS, *RUNTIMES}
SECTIONS = {t.section.__name__ for t in TARGETS.values()}
NAMED = re.compile("|".join((*map(re.escape, NAMES), *SECTIONS, "PRODUCTS", "getattr")))
KNOWN_BY_NAME = {"section", "target", "targets", "sections"}


def exceptions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            texts = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
            if any(isinstance(t, str) and t in NAMES for t in texts) or (
                "runtime" in ast.unparse(node.left) and "PRODUCTS" in ast.unparse(node)
            ):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "getattr"):
            words = set(ast.unparse(node.args[0]).split("."))
            classes = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            if classes & SECTIONS or (
                ast.unparse(node.func) == "getattr" and words & KNOWN_BY_NAME
            ):
                yield f"{node.lineno}: {ast.unparse(node)}"


def exceptions_in(source: str) -> list[str]:
    """Exceptions in a file's text; a text without any of the names is not parsed."""
    return list(exceptions(ast.parse(source))) if NAMED.search(source) else []


def test_no_code_asks_which_runtime_a_target_is() -> None:
    found = {f: exceptions_in((ROOT / f).read_text()) for f in FILES if f not in RECORDS}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "code",
    [
        "target.runtime == 'onnxruntime'",
        "runtime not in PRODUCTS",
        "isinstance(target, TensorRTTarget)",
        "getattr(target, 'threads', 0)",
        "name in ('tensorrt', 'tensorrt-rtx')",
    ],
)
def test_what_would_ask_it_is_seen(code: str) -> None:
    assert exceptions_in(code)


def test_what_a_record_names_exists() -> None:
    from optimizer.foundation.references import resolve

    for target in TARGETS.values():
        parts = (target.lower, target.build, target.fit, target.open, target.hops, target.package)
        assert all(callable(resolve(part)) for part in parts if part)
        assert target.section.model_fields["runtime"]
