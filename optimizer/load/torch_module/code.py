"""Find and import the Python files of a recipe's torch module.

A reference "package.file:name" starts at the recipe's folder. The files that it imports from there
are read by their import statements, before anything runs: their digests are in the step's key, and
no other file of the folder can be imported. sys.path stays as it is.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib import metadata
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch

from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.foundation.reading import check_regular, quote_error
from optimizer.harness.errors import ExplainedError
from optimizer.model.checkpoint import own_code
from optimizer.recipe.schema import Model
from optimizer.store import digest_file

LARGEST = 10_000_000  # bytes of a Python file
KEYS = ("module", "example")


def list_files(section: Model) -> dict[str, Path]:
    """Return {module: file} of a recipe's references and of all that they import from its folder.
    Nothing is run. Raises RecipeError for a file that is missing or does not parse."""
    return _read(section)[0]


def digest_files(section: Model) -> dict[str, str]:
    """Return what the keys of steps depend on beside the weights: {file: sha256} of the user's
    Python files, and {"package NAME": version} of the packages that these import."""
    base = get_folder(section)
    own, outside = _read(section)
    digest = {str(file.relative_to(base)): digest_file(file) for file in own.values()}
    names = metadata.packages_distributions()
    packages = {d for module in outside for d in names.get(module, ())}
    return digest | {f"package {name}": metadata.version(name) for name in sorted(packages)}


def _read(section: Model) -> tuple[dict[str, Path], set[str]]:
    """Read which Python modules the recipe's code imports: ({module: file in the folder}, first
    names of the other modules)."""
    base = get_folder(section)
    own, others = dict[str, Path](), set[str]()
    waiting = []
    for key in KEYS:
        module = str(getattr(section, key)).partition(":")[0]
        if locate(base, module) is None:
            raise RecipeError(
                f"{module.replace('.', '/')}.py does not exist",
                where=f"model.{key}: {base}",
                accepted='"file:function" or "package.file:function", from the recipe\'s folder',
            )
        waiting.append(module)
    while waiting:
        name = waiting.pop()
        file = locate(base, name)
        if file is None:
            others.add(name)
        elif name not in own:
            own[name] = file
            above, dot, _ = name.rpartition(".")
            waiting += [*_imports(name, file), *([above] if dot else [])]
    return dict(sorted(own.items())), _first(others) - _first(own)


def get_folder(section: Model) -> Path:
    """Return the folder of the recipe, in which the Python modules that it refers to are
    searched."""
    return Path(section.base).resolve()


def locate(base: Path, module: str) -> Path | None:
    """Find the Python file of a module of the recipe's own code below `base`; None without one."""
    place = base.joinpath(*module.split("."))
    candidates = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((file for file in candidates if file.is_file()), None)


def _first(modules: Iterable[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def _imports(module: str, file: Path) -> list[str]:
    """List the names that a file of the recipe's own code imports and that may be Python modules:
    `from a import b` gives both a and a.b."""
    check_regular(file, LARGEST)
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError, RecursionError) as e:
        raise RecipeError(
            f"it is not Python ({quote_error(e)})",
            where=f"{file}:{getattr(e, 'lineno', None) or 1}",
        ) from e
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            whole = ".".join([*above, *([node.module] if node.module else [])])
            names += [whole, *(f"{whole}.{alias.name}".lstrip(".") for alias in node.names)]
    return [name for name in names if name]


class _SourceLoader(SourceFileLoader):
    """Loader that neither reads nor writes compiled files, which could be older than the source."""

    def path_stats(self, path: Any) -> Any:
        raise OSError(path)


class _Finder:
    """Import finder, for sys.meta_path, of the files of list_files."""

    def __init__(self, base: Path, files: Mapping[str, Path]) -> None:
        self.base, self.files = base, files
        self.first = _first(files)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        file = self.files.get(name)
        place = self.base.joinpath(*name.split("."))
        if file is not None:
            below = [str(place)] if file.name == "__init__.py" else None
            loader = _SourceLoader(name, str(file))
            return spec_from_file_location(
                name, file, loader=loader, submodule_search_locations=below
            )
        if any(own.startswith(f"{name}.") for own in self.files):  # a folder without __init__.py
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        if name.partition(".")[0] in self.first:
            raise ModuleNotFoundError(
                f"{name} is not named by an import statement of model.module's files", name=name
            )
        return None


@contextmanager
def import_references(section: Model) -> Iterator[Mapping[str, Any]]:
    """{key of KEYS: the object that it names}, while the modules of the recipe's folder can be
    imported. What they print goes to stderr; the modules, torch's default type and its random
    numbers are as before at the end. Raises RecipeError for code that fails."""
    if not section.trust_code:  # the recipe is checked before; this is the place where code runs
        raise RecipeError("it is not true", where="model.trust_code", accepted="true")
    base = get_folder(section)
    finder: Any = _Finder(base, list_files(section))
    own = {n for n in sys.modules if n.partition(".")[0] in finder.first}
    for name in sorted(own):
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and not Path(file).is_relative_to(base):
            first = name.partition(".")[0]
            raise RecipeError(
                f"{first} is a file or folder there and a package in use",
                where=str(base),
                accepted="names that no installed package has",
                fix=f"Rename {first}.",
            )
    before = {name: sys.modules.pop(name) for name in own}
    default = torch.get_default_dtype()
    sys.meta_path.insert(0, finder)
    try:
        with own_code.contain(base), redirect_stdout(sys.stderr), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield {key: _object(section, key, base) for key in KEYS}
    finally:
        torch.set_default_dtype(default)
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] in finder.first]:
            del sys.modules[name]
        sys.modules.update(before)


def _object(section: Model, key: str, base: Path) -> Any:
    module, _, name = str(getattr(section, key)).partition(":")
    with translate_errors(f"model.{key}: {module}", base):
        value = getattr(importlib.import_module(module), name, None)
    if not callable(value):
        kind = "is not a function" if value is not None else "does not exist"
        raise RecipeError(
            f"{name} {kind}",
            where=f"model.{key}: {locate(base, module)}",
            accepted="a function without arguments",
        )
    return value


@contextmanager
def translate_errors(where: str, base: Path) -> Iterator[None]:
    """Turn an exception of the recipe's own code into RecipeError, with the line that raised it."""
    try:
        yield
    except (ExplainedError, KeyboardInterrupt, GeneratorExit, SystemExit):
        raise
    except MemoryError as e:
        raise MachineError("there is not enough memory", where=where) from e
    except BaseException as e:
        raise RecipeError(
            f"its code fails ({quote_error(e)}{locate_line(e, base)})",
            where=where,
            fix="--debug prints all of it.",
        ) from e


def locate_line(e: BaseException, base: Path) -> str:
    """Return ", at FILE:LINE" of the last line of the recipe's own code that an exception
    passed."""
    frames = [(Path(f.f_code.co_filename), line) for f, line in walk_tb(e.__traceback__)]
    own = [(file, line) for file, line in frames if file.is_relative_to(base)]
    return f", at {own[-1][0].relative_to(base)}:{own[-1][1]}" if own else ""
