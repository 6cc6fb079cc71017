"""A length that a recipe names must be one that the model has positions for."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.checks import lengths
from optimizer.checks.context import Context
from optimizer.foundation.errors import RecipeError
from optimizer.recipe import file as recipe_file
from tests.conftest import write_tiny_recipe
from tests.decoders import write_tiny_decoder
from tests.load.conftest import edit_json


@pytest.mark.parametrize(
    "override",
    ["model.max_length=65", "calibrate.sequence_length=65", "validate.latency.sequence=[16, 65]"],
)
def test_a_length_beyond_the_models_is_refused(
    tiny_bert: Path, tmp_path: Path, override: str
) -> None:
    recipe = write_tiny_recipe(tmp_path, tiny_bert)
    lengths.check(recipe_file.read(recipe), Context())
    with pytest.raises(RecipeError, match="65 tokens, but the model has 64 positions"):
        lengths.check(recipe_file.read(recipe, [override]), Context())


def test_a_default_is_cut_without_a_word(tiny_bert: Path, tmp_path: Path) -> None:
    recipe = write_tiny_recipe(tmp_path, tiny_bert)
    text = recipe.read_text().replace("    sequence: [16]\n", "")
    recipe.write_text(text.replace("  sequence_length: 32\n", ""))
    assert recipe_file.read(recipe).validate_.latency.sequence == (128,)
    lengths.check(recipe_file.read(recipe), Context())


@pytest.mark.parametrize(
    ("override", "fields", "message"),
    [
        (
            "latency.sequence=[8, 229]",
            {},
            r"sequence\.1: 257 tokens .with 28 of .*new_tokens., but",
        ),
        ("latency.sequence=[8]", {"sliding_window": 35}, "36 tokens .with 28 .* the last 35"),
        (
            "sequence_length=36",
            {"sliding_window": 35},
            "36 tokens, but .* the last 35",
        ),
    ],
)
def test_of_texts_that_are_continued_new_tokens_and_windows_count(
    override: str, fields: dict[str, int], message: str, tmp_path: Path
) -> None:
    model = write_tiny_decoder(tmp_path / "model", "mistral", sliding_window=None)
    edit_json(model / "config.json", **fields)
    recipe = write_tiny_recipe(tmp_path, model, "text-generation")
    fitting = ["validate.latency.new_tokens=28", "validate.latency.sequence=[7]"]
    fitting += ["calibrate.sequence_length=8", "validate.sequence_length=8"]
    fitting += ["validate.metric=perplexity"]
    lengths.check(recipe_file.read(recipe, fitting), Context())
    with pytest.raises(RecipeError, match=message):
        lengths.check(recipe_file.read(recipe, [*fitting, f"validate.{override}"]), Context())


def test_a_window_that_no_layer_has_is_no_limit(tmp_path: Path) -> None:
    for fields in ({"use_sliding_window": False}, {"layer_types": ["full_attention"] * 2}):
        model = write_tiny_decoder(tmp_path / "model", "qwen2")
        edit_json(model / "config.json", sliding_window=9, **fields)
        recipe = write_tiny_recipe(tmp_path, model, "text-generation")
        overrides = ["validate.latency.sequence=[100]", "validate.metric=perplexity"]
        lengths.check(recipe_file.read(recipe, overrides), Context())
