"""Copy the module of another package's task into a bundle.

A bundle's harness is the package `harness` without `optimizer`, so the module goes into its folder
tasks/ and its imports of the harness become relative.
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
from optimizer.foundation.references import find_entry_point
from optimizer.harness import tasks

HARNESS = "optimizer.harness"
IMPORT = re.compile(rf"^(\s*)from {re.escape(HARNESS)}\b\.?([\w.]*) import", re.M)
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
OURS, NUMPY = "optimizer", "numpy"


def name_file(task: str) -> str:
    """Return the file name, in a bundle's harness/tasks/, of the module of another package's
    task."""
    return f"{task.replace('-', '_')}.py"


def read_source(task: str) -> str | None:
    """The module's source with relative imports of the harness; None for a task of tasks.TASKS.
    Raises RecipeError for a module that imports a package that bundles lack."""
    if task in tasks.TASKS:
        return None
    _check_name(task)
    point = find_entry_point(tasks.GROUP, task)
    if point is None:
        raise KeyError(task)
    text = _file(point).read_text(encoding="utf-8")
    outside = sorted(n for n in _imported_modules(ast.parse(text)) if not _is_in_bundle(n))
    if outside:
        raise RecipeError(
            f"the module of task {task} imports {', '.join(outside)}, which a bundle does not have",
            where=str(_file(point)),
            accepted=f"the standard library, {NUMPY}, and from {HARNESS}.… import …",
        )
    return IMPORT.sub(r"\1from ..\2 import", text)


def _check_name(task: str) -> None:
    """Raise RecipeError for a task name that is malformed, or that is a module of the harness."""
    own = Path(tasks.__file__).parent / name_file(task)
    if NAME.fullmatch(task) and not own.exists():
        return
    raise RecipeError(
        f"{task!r} cannot be the name of a task"
        + (f": {own.name} is the harness's" if NAME.fullmatch(task) else ""),
        where="model.task",
        accepted="lower-case words joined by -, not the name of a module of the harness",
        fix=f"Rename the entry point in {tasks.GROUP} and the record.",
    )


def digest_files(task: str) -> dict[str, str]:
    """Return {file: sha256} that a stage's key depends on; {} for a task of tasks.TASKS."""
    text = read_source(task)
    return {} if text is None else {name_file(task): hashlib.sha256(text.encode()).hexdigest()}


def _file(point: EntryPoint) -> Path:
    spec = find_spec(point.module)
    return Path(str(spec.origin if spec else point.module))


def _imported_modules(tree: ast.Module) -> set[str]:
    """List the modules that another package's task imports; `import optimizer…` is returned as that
    statement, because only `from … import` can be made relative."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names if a.name.partition(".")[0] != OURS}
            names |= {f"import {a.name}" for a in node.names if a.name.partition(".")[0] == OURS}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def _is_in_bundle(module: str) -> bool:
    if module == HARNESS or module.startswith(f"{HARNESS}."):
        return True
    return module.partition(".")[0] in (NUMPY, *sys.stdlib_module_names)
