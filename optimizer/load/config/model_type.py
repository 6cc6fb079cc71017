"""Propose the model_type of a config.json that names none, and read the file with the recipe's."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import RecipeError
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.checkpoint.checkpoint import read_json

CONFIG = "config.json"


def list_candidates(raw: Mapping[str, Any], names: Collection[str] = ()) -> list[str]:
    """Return the model types whose transformers class is the first of `architectures`, or else the
    supported ones whose base model's name begins a name in `names`. One entry is certain.

    raw: content of config.json
    names: names of tensors in the files of weights
    """
    from transformers.models.auto import modeling_auto as auto

    listed = raw.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else ""
    tables = [table for name, table in vars(auto).items() if name.endswith("_MAPPING_NAMES")]
    by_class = {
        kind
        for table in tables
        for kind, classes in table.items()
        if architecture in ((classes,) if isinstance(classes, str) else classes)
    }
    if by_class:
        return sorted(by_class)
    bases = {name.partition(".")[0] for name in names}
    return sorted(kind for kind, family in FAMILIES.items() if family.base in bases)


def complete(raw: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    """Return the content of config.json with the recipe's model_type, `kind`. Raises RecipeError
    where the file names one too."""
    if kind is None:
        return dict(raw)
    if named := raw.get("model_type"):
        raise RecipeError(
            f"{kind!r} was given, and {CONFIG} names {str(named)[:80]!r}",
            where="model.model_type",
            accepted=f"a type for a {CONFIG} that names none",
            fix="Remove it from the recipe.",
        )
    return {**raw, "model_type": kind}


def complete_config(folder: Path, kind: str | None, scratch: Path) -> Path:
    """Return a folder of the model's files whose config.json names a model_type: `folder`, or where
    the recipe has one, `kind`, links to its files in `scratch`."""
    if kind is None:
        return folder
    links = scratch / "files"
    links.mkdir()
    for file in (f for f in folder.iterdir() if f.is_file() and f.name != CONFIG):
        (links / file.name).symlink_to(file.resolve())
    text = json.dumps(complete(read_json(folder / CONFIG), kind), indent=2)
    (links / CONFIG).write_text(text + "\n", encoding="utf-8")
    return links
