"""Check what a recipe asks of target openvino beyond what its record in targets/ says."""

from __future__ import annotations

from optimizer.foundation.errors import RecipeError
from optimizer.harness import tasks
from optimizer.recipe.schema import OpenVinoTarget, Recipe


def check(recipe: Recipe, section: OpenVinoTarget, at: str) -> None:
    """Raise RecipeError where the task does not generate text and the section sets `genai` (the
    folder that OpenVINO GenAI opens) or an integer `kv_cache`.

    at: path of the section
    """
    if tasks.find_task(recipe.model.task).generates:
        return
    if section.genai:
        raise RecipeError(
            f"true for {recipe.model.task}: OpenVINO GenAI opens models for generation",
            where=f"{at}.genai",
            accepted="false",
        )
    if section.rounds_cache:
        raise RecipeError(
            f"{section.kv_cache} for {recipe.model.task}, which has no KV cache",
            where=f"{at}.kv_cache",
            accepted="float",
        )
