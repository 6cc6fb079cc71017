"""Imports of benchmarks, which run rarely: the modules and names that they take still exist."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(  # peers/ run in environments of their own
    f for f in (ROOT / "benchmarks").rglob("*.py") if f.parent.name != "peers"
)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT / "benchmarks")))
def test_a_benchmark_imports(path: Path) -> None:
    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT / "benchmarks")))
def test_names_that_a_benchmark_imports_within_functions_exist(path: Path) -> None:
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
