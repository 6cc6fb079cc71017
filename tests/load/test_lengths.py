"""A length that a recipe names must be one that the model has positions for."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.errors import RecipeError
from optimizer.load import lengths
from optimizer.recipe import file as recipe_file
from tests.conftest import write_tiny_recipe


@pytest.mark.parametrize(
    "override",
    ["model.max_length=65", "calibrate.sequence_length=65", "validate.latency.sequence=[16, 65]"],
)
def test_a_length_beyond_the_models_is_refused(
    tiny_bert: Path, tmp_path: Path, override: str
) -> None:
    recipe = write_tiny_recipe(tmp_path, tiny_bert)
    lengths.check(recipe_file.read(recipe), fetch=False)
    with pytest.raises(RecipeError, match="65 tokens, and the model has 64 positions"):
        lengths.check(recipe_file.read(recipe, [override]), fetch=False)


def test_a_default_is_cut_without_a_word(tiny_bert: Path, tmp_path: Path) -> None:
    recipe = write_tiny_recipe(tmp_path, tiny_bert)
    text = recipe.read_text().replace("    sequence: [16]\n", "")
    recipe.write_text(text.replace("  sequence_length: 32\n", ""))
    assert recipe_file.read(recipe).validate_.latency.sequence == (128,)
    lengths.check(recipe_file.read(recipe), fetch=False)
