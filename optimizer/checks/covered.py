"""Is the recipe's model of an architecture that is loaded at all? Of config.json alone."""

from __future__ import annotations

from optimizer.load.config.config import at_hand, refuse_uncovered
from optimizer.load.providers import timm
from optimizer.recipe.schema import Recipe


def check(recipe: Recipe, *, fetch: bool) -> None:
    """Raise CheckpointError for an architecture that `load` would refuse by its name: one of
    transformers that is known not to be covered, or one of timm's that is not.

    fetch: also look at the config of a model that is on a hub; else only at one on this machine.
    """
    known = at_hand(recipe.model, fetch=fetch)
    if known is None:
        return
    file, raw = known
    if timm.is_timm(raw):
        timm.config(file.parent, raw)
    else:
        refuse_uncovered(raw, file)
