"""Refuse lengths in a recipe beyond the model's positions, by config.json only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optimizer.checks.context import Context
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.reading import reading
from optimizer.harness import tasks
from optimizer.load.config import config_fields
from optimizer.load.config.config import peek_config
from optimizer.load.providers import pairs
from optimizer.recipe.schema import Recipe

POSITIONS = ("max_position_embeddings", "n_positions")
SLIDING = "sliding_attention"


def check(recipe: Recipe, context: Context) -> None:
    """Check before a run: raise RecipeError for a length stated in the recipe that exceeds the
    model's positions. Texts are cut at the last position, so that reports would state a wrong
    length. Defaults are reduced silently.

    Raises CheckpointError for a config with invalid fields.
    """
    section = recipe.model
    if section.max_length is not None:
        _refuse_beyond(section.max_length, recipe, f"model.max_length is {section.max_length}")
    known = peek_config(section, fetch=context.fetch)
    if known is None:
        return
    file, config = known
    if not config.get("auto_map"):
        with reading(file.parent):
            config_fields.check(config, file)
    if pairs.is_pair(config):
        config = config.get("text_config") or {}
    positions = next((config[p] for p in POSITIONS if isinstance(config.get(p), int)), None)
    if positions:
        _refuse_beyond(positions, recipe, f"the model has {positions} positions ({file})")
    window = _window(config) if tasks.find_task(section.task).generates else None
    if window:
        _refuse_beyond(
            window,
            recipe,
            f"its layers attend to the last {window} tokens, the maximum supported here",
        )


def _window(config: Mapping[str, Any]) -> int | None:
    """Return, to check a recipe's lengths, the sliding window, in tokens, that a decoder's
    config.json states; None without one."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    used = config.get("use_sliding_window", True) and (kinds is None or SLIDING in kinds)
    return window if used and isinstance(window, int) else None


def _refuse_beyond(longest: int, recipe: Recipe, why: str) -> None:
    for path, length, counted in _lengths(recipe):
        if length > longest:
            raise RecipeError(
                f"{length} tokens{counted}, but {why}",
                where=path,
                accepted=f"up to {longest}",
                fix="Longer texts are cut, so the report would state a wrong length.",
            )


def _lengths(recipe: Recipe) -> list[tuple[str, int, str]]:
    """Return (path in the recipe, tokens, note on what the tokens include) of every length that the
    checked recipe states."""
    written: list[tuple[str, Any, str]] = [("model.max_length", recipe.model.max_length, "")]
    if recipe.calibrate and "sequence_length" in recipe.calibrate.model_fields_set:
        written.append(("calibrate.sequence_length", recipe.calibrate.sequence_length, ""))
    if "sequence_length" in recipe.validate_.model_fields_set:
        written.append(("validate.sequence_length", recipe.validate_.sequence_length, ""))
    latency, new, counted = recipe.validate_.latency, 0, ""
    if tasks.find_task(recipe.model.task).generates:
        new = latency.new_tokens
        counted = f" (with {new} of validate.latency.new_tokens)"
    if "sequence" in latency.model_fields_set:
        path = "validate.latency.sequence"
        written += [(f"{path}.{i}", n + new, counted) for i, n in enumerate(latency.sequence)]
    return [(path, length, counted) for path, length, counted in written if length is not None]
