"""Give initializers the names that the checkpoint has for their parameters."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from optimizer.export.scopes import WRAPPED


def find_parameter_names(model: ir.Model, first: Mapping[str, str]) -> dict[str, str]:
    """Return {initializer of the exported graph: its parameter or buffer}; other initializers are
    constants.

    first: {parameter: first of its names}, the name that the initializer of tied ones gets
    """
    names = [n for n in map(str, model.graph.initializers) if n.startswith(f"{WRAPPED}.")]
    plain = {n: n.removeprefix(f"{WRAPPED}.") for n in names}
    return {n: first.get(name, name) for n, name in plain.items()}


def rename(model: ir.Model, names: Mapping[str, str]) -> None:
    """Rename initializers of the exported graph: {old name: new name}."""
    for old, new in names.items():
        model.graph.initializers[old].name = new


def is_renamed(model: ir.Model, names: Mapping[str, str]) -> bool:
    """Test that the exported graph has an initializer for every new name of `names`."""
    return set(names.values()) <= set(model.graph.initializers)
