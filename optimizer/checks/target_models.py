"""Refuse models that a target's format cannot express, by config.json only."""

from __future__ import annotations

from optimizer import targets
from optimizer.checks.context import Context
from optimizer.foundation.reading import reading
from optimizer.foundation.references import resolve
from optimizer.harness import tasks
from optimizer.load import source
from optimizer.load.config.config import read_complete_config
from optimizer.load.config.model_folder import model_folder
from optimizer.recipe.schema import Recipe


def check(recipe: Recipe, context: Context) -> None:
    """Check before a run: raise RecipeError for the first target whose format cannot express this
    model's architecture.

    GGUF files, ONNX files, torch modules and models with code of their own are skipped, because
    only loading them shows their architecture.
    """
    records = [(i, targets.look_up(section.runtime)) for i, section in enumerate(recipe.targets)]
    section = recipe.model
    if not any(record.check_model for _, record in records):
        return
    unread = section.gguf_file is not None or section.trust_remote_code
    unread = unread or tasks.find_task(section.task).of_file
    if unread or not (context.fetch or source.is_local(section.source, section.base)):
        return
    root = source.peek(section).folder
    with reading(root):
        config = read_complete_config(model_folder(root))
    for i, record in records:
        if record.check_model:
            resolve(record.check_model)(config, f"targets.{i}", recipe, recipe.targets[i])
