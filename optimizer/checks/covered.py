"""Refuse models of unsupported architectures, by config.json only."""

from __future__ import annotations

from optimizer.checks.context import Context
from optimizer.foundation.reading import reading
from optimizer.load.config.config import peek_config, read_config
from optimizer.recipe.schema import Recipe


def check(recipe: Recipe, context: Context) -> None:
    """Check before a run: raise CheckpointError for a config that stage load would refuse. Models
    with code of their own are skipped, because only running that code shows their architecture."""
    known = peek_config(recipe.model, fetch=context.fetch)
    if known is not None and not recipe.model.trust_remote_code:
        folder = known[0].parent
        with reading(folder):
            read_config(folder, recipe.model)
