"""Facts that depend on the task stand in its record; nothing else compares its name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import optimizer
from optimizer.harness import tasks

ROOT = Path(optimizer.__file__).parent


def test_the_names_of_tasks_stand_in_their_own_files_only() -> None:
    name = re.compile("|".join(map(re.escape, tasks.TASKS)))  # of a task; most files have none
    places = {
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sorted(ROOT.rglob("*.py"))
        if not file.is_relative_to(ROOT / "harness" / "tasks")
        if name.search(file.read_text())
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in tasks.TASKS
    }
    assert places == set()
