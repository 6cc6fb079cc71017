"""Check a recipe with the target gguf beyond its record in targets/__init__.py."""

from __future__ import annotations

from optimizer.foundation.errors import RecipeError
from optimizer.harness import tasks
from optimizer.recipe.schema import Recipe
from optimizer.recipe.targets import GgufTarget
from optimizer.targets import list_weight_blocks


def check(recipe: Recipe, _section: GgufTarget, at: str) -> None:
    """Refuse a recipe's gguf target: raise RecipeError for a task without generation and for 8 bits
    with zero points."""
    if not tasks.find_task(recipe.model.task).generates:
        raise RecipeError(
            f"{recipe.model.task} is not accepted by target gguf ({at}): its files hold language "
            "models",
            where="model.task",
            accepted=", ".join(n for n, task in tasks.TASKS.items() if task.generates),
        )
    for where, weights in list_weight_blocks(recipe):
        if weights.bits == 8 and not weights.symmetric:
            raise RecipeError(
                f"false with bits: 8 is not accepted by target gguf ({at}): Q8_0 has a scale only",
                where=f"{where}.symmetric",
                accepted="true; false with bits: 4, which becomes Q4_1",
            )
