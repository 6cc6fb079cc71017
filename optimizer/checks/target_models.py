"""Can every target of a recipe hold its model? Of config.json alone."""

from __future__ import annotations

from optimizer import targets
from optimizer.foundation.reading import reading
from optimizer.foundation.references import resolve
from optimizer.load import source
from optimizer.load.config.config import complete, model_folder
from optimizer.recipe.schema import Recipe


def check(recipe: Recipe, *, fetch: bool) -> None:
    """Raise RecipeError for the first target whose format cannot say this model's architecture.

    fetch: also look at the config of a model that is on a hub; else only at one on this machine.
    Of a GGUF file and of a model with its own code nothing is known before it is loaded.
    """
    records = [(i, targets.of(section.runtime)) for i, section in enumerate(recipe.targets)]
    section = recipe.model
    if not any(record.check_model for _, record in records):
        return
    unread = section.gguf_file is not None or section.trust_remote_code
    if unread or not (fetch or source.is_local(section.source)):
        return
    root = source.peek(section).folder
    with reading(root):
        config = complete(model_folder(root))
    for i, record in records:
        if record.check_model:
            resolve(record.check_model)(config, f"targets.{i}")
