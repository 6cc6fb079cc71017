"""Refuse models of unsupported architectures, by config.json only."""

from __future__ import annotations

from optimizer.checks.context import Context
from optimizer.load.config.config import peek_config, refuse_uncovered
from optimizer.load.providers import timm
from optimizer.recipe.schema import Recipe


def check(recipe: Recipe, context: Context) -> None:
    """Raise CheckpointError for an architecture of transformers or timm that `load` would refuse by
    its name."""
    config = peek_config(recipe.model, fetch=context.fetch)
    if config is None:
        return
    file, raw = config
    if timm.is_timm(raw):
        timm.config(file.parent, raw)
    else:
        refuse_uncovered(raw, file)
