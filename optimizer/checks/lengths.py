"""Is every length in a recipe one that the model can take? Of config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optimizer.foundation.errors import RecipeError
from optimizer.foundation.reading import reading
from optimizer.harness import tasks
from optimizer.load.config import config_fields
from optimizer.load.config.config import at_hand
from optimizer.recipe.schema import Recipe

POSITIONS = ("max_position_embeddings", "n_positions")
SLIDING = "sliding_attention"


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
    window = _window(config) if tasks.task(section.task).generates else None
    if window:
        _refuse_beyond(window, recipe, f"layers see a window of {window}, the longest text here")


def _window(config: Mapping[str, Any]) -> int | None:
    """Tokens that a decoder's layers see, of a config.json; see generation.context."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    used = config.get("use_sliding_window", True) and (kinds is None or SLIDING in kinds)
    return window if used and isinstance(window, int) else None


def _refuse_beyond(longest: int, recipe: Recipe, why: str) -> None:
    for path, length, counted in _lengths(recipe):
        if length > longest:
            raise RecipeError(
                f"{length} tokens{counted}, and {why}",
                where=path,
                accepted=f"up to {longest}",
                fix="Texts are cut there, and what is reported would be called by another length.",
            )


def _lengths(recipe: Recipe) -> list[tuple[str, int, str]]:
    """(path in the recipe, tokens, what else is counted in them) of every length that is written
    there."""
    written: list[tuple[str, Any, str]] = [("model.max_length", recipe.model.max_length, "")]
    if recipe.calibrate and "sequence_length" in recipe.calibrate.model_fields_set:
        written.append(("calibrate.sequence_length", recipe.calibrate.sequence_length, ""))
    if "sequence_length" in recipe.validate_.model_fields_set:
        written.append(("validate.sequence_length", recipe.validate_.sequence_length, ""))
    latency, new, counted = recipe.validate_.latency, 0, ""
    if tasks.task(recipe.model.task).generates:
        new = latency.new_tokens
        counted = f" with the {new} of validate.latency.new_tokens"
    if "sequence" in latency.model_fields_set:
        path = "validate.latency.sequence"
        written += [(f"{path}.{i}", n + new, counted) for i, n in enumerate(latency.sequence)]
    return [(path, length, counted) for path, length, counted in written if length is not None]
