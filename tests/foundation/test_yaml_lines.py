"""YAML with lines: limits of a document, and the place that a message names."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.foundation.errors import RecipeError
from optimizer.foundation.yaml_lines import DEPTH, VALUES, read_yaml


def test_the_first_value_too_many_is_named(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("a:\n" + "- 1\n" * VALUES)
    with pytest.raises(RecipeError, match=f"more than {VALUES:,} values") as refused:
        read_yaml(file)
    assert refused.value.where == f"{file}:{VALUES - 1}"  # the whole, a and the list are values


def test_the_first_level_too_many_is_named(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    levels = DEPTH - 1  # besides the mapping
    file.write_text("a:\n" + " [\n" * levels + " ]\n" * levels)
    assert read_yaml(file)[0]["a"]
    file.write_text("a:\n" + " [\n" * (levels + 1) + " ]\n" * (levels + 1))
    with pytest.raises(RecipeError, match=f"more than {DEPTH} levels") as refused:
        read_yaml(file)
    assert refused.value.where == f"{file}:{levels + 2}"
