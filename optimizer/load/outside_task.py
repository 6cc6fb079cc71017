"""The module of a task of another package, as a bundle carries it.

A bundle has no package of ours: its harness is the package `harness`, so the module lies in its
folder tasks/ and imports the harness relatively.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

from optimizer.foundation.errors import RecipeError
from optimizer.foundation.references import entry_point
from optimizer.harness import tasks

HARNESS = "optimizer.harness"
IMPORT = re.compile(rf"^(\s*)from {re.escape(HARNESS)}\b\.?([\w.]*) import", re.M)
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
OURS, NUMPY = "optimizer", "numpy"


def file_name(task: str) -> str:
    """Of the module in a bundle's harness/tasks/."""
    return f"{task.replace('-', '_')}.py"


def source(task: str) -> str | None:
    """The module's source with relative imports of the harness; None for a task of our own table.

    Raises RecipeError for a module that imports what a bundle has not.
    """
    if task in tasks.TASKS:
        return None
    _check_name(task)
    point = entry_point(tasks.GROUP, task)
    if point is None:
        raise KeyError(task)
    text = _file(point).read_text(encoding="utf-8")
    outside = sorted(n for n in _imported(ast.parse(text)) if not _in_a_bundle(n))
    if outside:
        raise RecipeError(
            f"the module of task {task} imports {', '.join(outside)}, which a bundle has not",
            where=str(_file(point)),
            accepted=f"the standard library, {NUMPY}, and from {HARNESS}.… import …",
        )
    return IMPORT.sub(r"\1from ..\2 import", text)


def _check_name(task: str) -> None:
    """Its module stands beside the harness's own, and under no other name than theirs. Raises
    RecipeError."""
    own = Path(tasks.__file__).parent / file_name(task)
    if NAME.fullmatch(task) and not own.exists():
        return
    raise RecipeError(
        f"{task!r} cannot be the name of a task"
        + (f": {own.name} is the harness's" if NAME.fullmatch(task) else ""),
        where="model.task",
        accepted="lower-case words joined by -, of which the harness has no module",
        fix=f"Rename the entry point in {tasks.GROUP} and the record.",
    )


def digests(task: str) -> dict[str, str]:
    """What a key depends on besides the name of the task: {file: sha256}; {} of our own table."""
    text = source(task)
    return {} if text is None else {file_name(task): hashlib.sha256(text.encode()).hexdigest()}


def _file(point: EntryPoint) -> Path:
    spec = find_spec(point.module)
    return Path(str(spec.origin if spec else point.module))


def _imported(tree: ast.Module) -> set[str]:
    """The modules it imports; of ours those by `from … import` alone can be made relative, so that
    another import is named as it stands, and no module."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names if a.name.partition(".")[0] != OURS}
            names |= {f"import {a.name}" for a in node.names if a.name.partition(".")[0] == OURS}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def _in_a_bundle(module: str) -> bool:
    if module == HARNESS or module.startswith(f"{HARNESS}."):
        return True
    return module.partition(".")[0] in (NUMPY, *sys.stdlib_module_names)
