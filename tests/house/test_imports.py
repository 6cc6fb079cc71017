"""Check who may import what: the architecture, as a table."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.house import facts

ROOT = Path(__file__).parents[2] / "optimizer"
ALLOWED = {
    "onnx": ("load/onnx_model/", "export/", "lower/"),
    "onnx_ir": ("export/", "lower/"),
    "onnxscript": ("export/",),
    "onnxruntime": ("harness/runtimes/ort/run.py",),
    "openvino": ("harness/runtimes/openvino/",),
    "tensorrt": ("harness/runtimes/trt/",),
    "tensorrt_rtx": ("harness/runtimes/trt/",),
    "transformers": ("model/", "load/", "reduce/", "export/", "validate/"),
    "datasets": ("data/",),
    "huggingface_hub": ("data/", "load/", "publish/hubs/hub.py"),
    "obstore": ("foundation/buckets/objects.py",),
    "botocore": ("foundation/buckets/objects.py",),
    "mlflow": ("publish/hubs/mlflow.py",),
    "optuna": ("search/",),
    "click": ("cli.py", "commands/"),
}


@cache
def imported(file: Path) -> frozenset[str]:
    """The top-level names of every absolute import, also inside functions."""
    names: set[str] = set()
    for node, _ in facts.of(file).imports:
        if isinstance(node, ast.Import):
            names |= {a.name.partition(".")[0] for a in node.names}
        elif not node.level:
            names.add((node.module or "").partition(".")[0])
    return frozenset(names)


FILES = sorted(ROOT.rglob("*.py"))
STAGES = (  # reduce runs before compress, and borrows its walk over the blocks
    *("foundation", "recipe", "model", "data", "load", "compress", "reduce", "export", "lower"),
    *("validate", "package", "publish", "commands"),
)
MOST_FILES = 15


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(f): f for f in FILES}


def needs(module: str, types: bool = False) -> set[str]:
    """The modules of ours that one imports, also inside functions. types: those too that are
    imported for types alone."""
    file = MODULES[module]
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    needed = set()
    for node, for_types in facts.of(file).imports:
        if for_types and not types:
            continue
        if isinstance(node, ast.Import):
            needed |= {a.name for a in node.names}
        else:
            above = package[: len(package) + 1 - node.level] if node.level else []
            whole = ".".join([*above, *filter(None, [node.module])])
            needed |= {n if (n := f"{whole}.{a.name}") in MODULES else whole for a in node.names}
    return (needed & set(MODULES)) - {module}


@cache
def graph() -> dict[str, set[str]]:
    """{module: modules that it imports}."""
    return {module: needs(module) for module in MODULES}


def test_no_module_needs_itself_by_way_of_others() -> None:
    sorter = graphlib.TopologicalSorter(graph())
    sorter.prepare()  # raises CycleError, with the circle


def room(module: str) -> str:
    """The first folder below optimizer/ or optimizer/harness/; a module in none is a room alone."""
    parts = module.split(".")[1:]
    depth = 2 if parts[:1] == ["harness"] else 1
    folder = ROOT.joinpath(*parts[:depth])
    return ".".join(parts[:depth]) if folder.is_dir() else ".".join(parts)


def test_rooms_form_no_circle_with_imports_for_types() -> None:
    rooms: dict[str, set[str]] = {}
    for module in MODULES:
        for other in needs(module, types=True):
            if room(module) != room(other):
                rooms.setdefault(room(module), set()).add(room(other))
    graphlib.TopologicalSorter(rooms).prepare()  # raises CycleError, with the circle


def test_a_folder_has_no_more_files_than_a_reader_sees_at_once() -> None:
    top = ROOT.parent
    folders = [f for part in ("optimizer", "tests", "benchmarks") for f in (top / part).rglob("*/")]
    files = {str(f.relative_to(top)): len(list(f.glob("*.py"))) for f in folders}
    assert {folder: n for folder, n in files.items() if n > MOST_FILES} == {}


def test_stages_need_only_those_before_them() -> None:
    place = {stage: i for i, stage in enumerate(STAGES)}
    arrows = [(m, n) for m, ns in graph().items() for n in ns]
    wrong = [
        f"{m} imports {n}"
        for m, n in arrows
        for a, b in [(m.split(".")[1:2], n.split(".")[1:2])]
        if a and b and place.get(b[0], -1) > place.get(a[0], len(place))
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_is_imported_only_where_it_belongs(package: str) -> None:
    users = {str(f.relative_to(ROOT)) for f in FILES if package in imported(f)}
    assert {u for u in users if not u.startswith(ALLOWED[package])} == set()


def test_the_harness_imports_nothing_else_of_ours_and_no_training_library() -> None:
    banned = {"optimizer", "torch", "transformers", "pydantic", "click", "datasets", "onnx"}
    users = {
        str(f.relative_to(ROOT)): sorted(imported(f) & banned)
        for f in FILES
        if f.is_relative_to(ROOT / "harness")
    }
    assert {u: names for u, names in users.items() if names} == {}


def test_methods_are_maths_on_tensors() -> None:
    """They import torch and the ground floor only."""
    stages = ("compress", "reduce")
    allowed = {
        "optimizer.foundation.qtensor",
        "optimizer.foundation.sections.method_options",  # the options that the recipe holds
        "optimizer.foundation.sparsity",
        "optimizer.foundation.state",
    }
    allowed |= {f"optimizer.{stage}.methods" for stage in stages}
    outside = {}
    for file in sorted(f for s in stages for f in (ROOT / s / "methods").rglob("*.py")):
        names = {
            f"{node.module}.{a.name}"
            if node.module in ("optimizer", "optimizer.foundation")
            else str(node.module)
            for node, _ in facts.of(file).imports
            if isinstance(node, ast.ImportFrom)
            for a in node.names
        }
        ours = {n for n in names if n.split(".")[0] == "optimizer"}
        wrong = {n for n in ours if not any(n == a or n.startswith(f"{a}.") for a in allowed)}
        wrong |= imported(file) - {"optimizer", "torch", *sys.stdlib_module_names}
        if wrong:
            outside[file.name] = sorted(wrong)
    assert outside == {}


def test_no_module_reads_the_environment_but_the_command_line() -> None:
    readers = {
        str(f.relative_to(ROOT))
        for f in FILES
        if re.search(r"environ|getenv", f.read_text())
        and any(
            isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")
            for n in ast.walk(ast.parse(f.read_text()))
        )
    }
    assert readers - {"cli.py"} == set()


def test_every_file_fits_in_the_head() -> None:
    lines = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in FILES}
    assert {name: count for name, count in lines.items() if count > 500} == {}
    empty = ("util", "helper", "common", "misc")
    assert [f.name for f in FILES if any(word in f.stem for word in empty)] == []
