"""Read modules.json, the list of modules of a sentence-transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.foundation import reading
from optimizer.foundation.errors import CheckpointError
from optimizer.model.checkpoint.checkpoint import GET_AGAIN

TRANSFORMER_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the Transformer module's config, in the order in which the library looks for them."""

TRANSFORMERS = (".Transformer", ".MLMTransformer")
"""Ends of the classes of modules that hold a transformer."""


def locate_config(folder: Path) -> Path:
    """The path of the Transformer module's config, existing or not."""
    files = [folder / name for name in TRANSFORMER_CONFIGS]
    return next((file for file in files if file.is_file()), files[0])


def read_modules(root: Path) -> list[dict[str, Any]]:
    """Read the modules of a sentence-transformers model from modules.json, by idx. Raises
    CheckpointError when it is not a list of modules."""
    file = root / "modules.json"
    document = reading.read_json(file, fix=GET_AGAIN)
    modules = document if isinstance(document, list) else [None]
    for module in modules:
        if not isinstance(module, dict) or not isinstance(module.get("idx"), int):
            raise CheckpointError(
                "it is not a list of modules, each with an idx", where=str(file), fix=GET_AGAIN
            )
        if not isinstance(module.get("path", ""), str):
            raise CheckpointError(
                f"path {module['path']!r} is not a string", where=str(file), fix=GET_AGAIN
            )
        locate_module(root, module)
    return sorted(modules, key=lambda m: m["idx"])


def locate_module(root: Path, module: Mapping[str, Any]) -> Path:
    """Find the folder of one module of a sentence-transformers model. Raises CheckpointError when
    it lies outside `root`, because no digest would cover its files."""
    path = str(module.get("path", ""))
    with reading.reading(f"{root / 'modules.json'}: path {path!r}"):
        folder = (root / path).resolve()
    if not folder.is_relative_to(root.resolve()):
        raise CheckpointError(
            f"path {path!r} leaves the folder",
            where=str(root / "modules.json"),
            accepted="a folder inside it",
        )
    return folder
