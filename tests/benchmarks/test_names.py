"""Benchmarks run rarely: what they import of the project must still be there when they do."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FILES = sorted(
    f for f in BENCHMARKS.rglob("*.py") if f.name != "__init__.py" and f.parent.name != "peers"
)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_what_a_benchmark_imports_is_there(path: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("optimizer"):
            continue
        module = importlib.import_module(node.module or "")
        for alias in node.names:
            if not hasattr(module, alias.name):
                try:
                    importlib.import_module(f"{node.module}.{alias.name}")
                except ModuleNotFoundError:
                    missing.append(f"line {node.lineno}: {node.module}.{alias.name}")
    assert not missing
