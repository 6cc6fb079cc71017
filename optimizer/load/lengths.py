"""Is every length in a recipe one that the model can take? Of config.json alone."""

from __future__ import annotations

from typing import Any

from optimizer.errors import RecipeError
from optimizer.load import config_fields
from optimizer.load.config import at_hand
from optimizer.reading import reading
from optimizer.recipe.schema import Recipe

POSITIONS = ("max_position_embeddings", "n_positions")


def check(recipe: Recipe, *, fetch: bool) -> None:
    """Raise RecipeError for a length that the recipe names and that is more than the model has
    positions: texts are cut there, so what is reported would not be what it is called.

    Defaults are no such thing: they are cut without a word. fetch: also look at the config of a
    model that is on a hub; else only at one on this machine. Raises CheckpointError as
    config_fields.check does.
    """
    section = recipe.model
    if section.max_length is not None:
        _refuse_beyond(section.max_length, recipe, f"model.max_length is {section.max_length}")
    known = at_hand(section, fetch=fetch)
    if known is None:
        return
    file, config = known
    if not config.get("auto_map"):
        with reading(file.parent):
            config_fields.check(config, file)
    positions = next((config[p] for p in POSITIONS if isinstance(config.get(p), int)), None)
    if positions:
        _refuse_beyond(positions, recipe, f"the model has {positions} positions ({file})")


def _refuse_beyond(longest: int, recipe: Recipe, why: str) -> None:
    for path, length in _lengths(recipe):
        if length > longest:
            raise RecipeError(
                f"{length} tokens, and {why}",
                where=path,
                accepted=f"up to {longest}",
                fix="Texts are cut there, and what is reported would be called by another length.",
            )


def _lengths(recipe: Recipe) -> list[tuple[str, int]]:
    """(path in the recipe, tokens) of every length that is written there."""
    written: list[tuple[str, Any]] = [("model.max_length", recipe.model.max_length)]
    if recipe.calibrate and "sequence_length" in recipe.calibrate.model_fields_set:
        written.append(("calibrate.sequence_length", recipe.calibrate.sequence_length))
    if "sequence_length" in recipe.validate_.model_fields_set:
        written.append(("validate.sequence_length", recipe.validate_.sequence_length))
    latency = recipe.validate_.latency
    if "sequence" in latency.model_fields_set:
        written += [(f"validate.latency.sequence.{i}", n) for i, n in enumerate(latency.sequence)]
    return [(path, length) for path, length in written if length is not None]
