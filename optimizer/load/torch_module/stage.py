"""Load a torch module: export it to an ONNX file, and load that file as any other.

The reference at load is the module itself: the graph's answers to drawn rows and to the rows of the
example are compared with its own (onnx_model/reference.py).

out/original/model.onnx     the exported file, which later stages compare with
out/origin.json             how far the module's answers lie from the graph's
out/source.json             the module, and the digests of its files and weights
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError
from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.load.onnx_model import files as onnx_files
from optimizer.load.onnx_model import stage as onnx_model
from optimizer.load.onnx_model.stage import Opened
from optimizer.load.torch_module import code, export
from optimizer.load.torch_module import module as modules
from optimizer.load.torch_module.module import TorchModule
from optimizer.recipe.schema import Model
from optimizer.store import Estimate, Shapes, digest_file

EXPORTER = 220_000_000  # bytes resident after importing torch.onnx's exporter; measured


def takes(section: Model) -> bool:
    """Return True for a model that is a torch module."""
    return section.module is not None


@contextmanager
def _exported(section: Model) -> Iterator[tuple[Model, TorchModule]]:
    """Export the recipe's torch module to an ONNX file: yield (section of this file, the module),
    while both exist."""
    with make_temporary_folder("module") as folder, code.import_references(section) as functions:
        module = modules.build(section, functions)
        file = export.to_file(module, folder)
        own = dict.fromkeys(("module", "weights", "example"), None)
        with _of_module(str(section.module), file):
            yield section.model_copy(update={**own, "source": str(file), "base": ""}), module


@contextmanager
def _of_module(name: str, file: Path) -> Iterator[None]:
    """Name the module in errors about the exported file, which is gone when they are read."""
    try:
        yield
    except CheckpointError as e:
        again = e.fix.startswith("Export the model")
        raise CheckpointError(
            e.problem,
            where=e.where.replace(str(file), f"model.module: {name}, exported"),
            accepted=e.accepted,
            fix="Change forward or example, or name the outputs to keep: model.outputs."
            if again
            else e.fix,
        ) from e


def run(section: Model, out: Path) -> None:
    """Load the recipe's torch module: export it and write the stage's files to `out`. Raises
    CheckpointError for a module that cannot be exported, RecipeError for code or settings that
    fail."""
    with _exported(section) as (of_file, module):
        onnx_model.run(of_file, out, module)
    file = out / "source.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    document |= {**origin(section), "architecture": type(module.module).__name__}
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def origin(section: Model) -> dict[str, Any]:
    """Return {"source", "revision", "files": {file: {sha256, size}}} of a recipe's torch module:
    its Python files and its weights. Nothing is imported."""
    base = code.get_folder(section)
    python = {str(path.relative_to(base)): path for path in code.list_files(section).values()}
    weights = {str(section.weights): modules.find_weights(section)}
    return {
        "source": section.module,
        "revision": None,
        "files": onnx_files.describe({**python, **weights}),
    }


def check(section: Model, out: Path) -> Opened:
    """Check the recipe's torch module: export it, run the file in ONNX Runtime, and write
    contract.json only.

    Returns the opened file.
    """
    with _exported(section) as (of_file, _):
        return onnx_model.check(of_file, out)


def digests(section: Model) -> dict[str, str]:
    """Return {file: sha256} of the Python files and the weights; {"package NAME": version} of the
    packages that the files import. Nothing is imported."""
    file = modules.find_weights(section)
    return {**code.digest_files(section), str(section.weights): digest_file(file)}


def shapes(section: Model) -> Shapes:
    """Return {parameter: shape} of the recipe's torch module as exported, with the needs of its
    graph's parts."""
    with _exported(section) as (of_file, _):
        return onnx_model.shapes(of_file)


def estimate(shapes: Shapes, imports: int) -> Estimate:
    """Add the module and the exporter to the needs of an ONNX file."""
    size = 4 * sum(prod(s) for s in shapes.values())
    of_file = onnx_model.estimate(shapes, imports + EXPORTER)
    return Estimate(of_file.memory + 2 * size, of_file.disk, of_file.seconds + 10)
