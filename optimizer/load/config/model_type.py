"""Propose the model_type of a config.json that names none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from optimizer.model.architectures.families import FAMILIES


def candidates(raw: Mapping[str, Any], names: Collection[str] = ()) -> list[str]:
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
