"""Is the recipe's model of an architecture that is loaded at all? Of config.json alone."""

from __future__ import annotations

from optimizer.load import source
from optimizer.load.checkpoint import read_json
from optimizer.load.config import model_folder, refuse_uncovered
from optimizer.load.providers import timm
from optimizer.reading import reading
from optimizer.recipe.schema import Recipe


def check(recipe: Recipe, *, fetch: bool) -> None:
    """Raise CheckpointError for an architecture that `load` would refuse by its name: one of
    transformers that is known not to be covered, or one of timm's that is not.

    fetch: also look at the config of a model that is on a hub; else only at one on this machine.
    """
    section = recipe.model
    if section.gguf_file is not None or not (fetch or source.is_local(section.source)):
        return
    root = source.peek(section).folder
    with reading(root):
        folder = model_folder(root)
        raw = read_json(folder / "config.json")
    if timm.is_timm(raw):
        timm.config(folder, raw)
    else:
        refuse_uncovered(raw, folder / "config.json")
