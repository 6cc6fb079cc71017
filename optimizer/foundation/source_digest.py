"""Digest of a stage's code: its module and every module of this package that it imports.

It is part of a step's key, so that changed code, a comment included, repeats the step.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # where statements hold statements
PACKAGE = __name__.partition(".")[0]
FOLDER = Path(__file__).parents[1]  # of the package


@cache
def digest_sources(module: str, own: bool = False) -> str:
    """Return the sha256 of the sources of `module` and, transitively, of the modules of this
    package that it imports, also inside functions; "" for a module of another package.

    own: True: also digest a module of another package, with its imports of that package
    """
    packages = {PACKAGE, _top(module)} if own else {PACKAGE}
    if _top(module) not in packages:
        return ""
    sources: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = _file(name)
        if file is None or name in sources:
            continue
        sources[name] = file.read_bytes()
        waiting += [n for n in _imports(name, file, sources[name]) if _top(n) in packages]
    whole = hashlib.sha256()
    for name in sorted(sources):
        whole.update(f"{name} {len(sources[name])}\n".encode() + sources[name])
    return whole.hexdigest()


def _file(module: str) -> Path | None:
    if _top(module) == PACKAGE:
        return _own_file(module)
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # "package.module.name" where name is not a module
        return None
    return Path(spec.origin) if spec and spec.origin else None


@cache
def _own_file(module: str) -> Path | None:
    """Return the file of a module of this package; None for other modules. The path is derived from
    the name, because find_spec would import the parent packages."""
    path = FOLDER.joinpath(*module.split(".")[1:])
    files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((file for file in files if file.is_file()), None)


@cache
def _imports(module: str, file: Path, source: bytes) -> list[str]:
    """Return the names that a source imports and that may be modules: `from a import b` gives a and
    a.b.

    Cached, because many digests share modules, and parsing one is the slow part.
    """
    names: list[str] = []
    if file.suffix != ".py":  # compiled: only its bytes are digested
        return names
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement, at any depth. Expressions contain no statements, so only a sixth of
    the nodes is visited."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        for field in BLOCKS:
            waiting += getattr(node, field, ())
        yield node


def _top(module: str) -> str:
    return module.partition(".")[0]
