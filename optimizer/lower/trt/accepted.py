"""What a product of the TensorRT family takes of a recipe."""

from __future__ import annotations

from optimizer.foundation.errors import RecipeError
from optimizer.harness.errors import BuildError
from optimizer.harness.runtimes.trt.products import refuse_options
from optimizer.recipe.schema import Recipe, TensorRTTarget


def check(_recipe: Recipe, section: TensorRTTarget, at: str) -> None:
    """An option its product does not have would be dropped in silence by the builder."""
    try:
        refuse_options(section.runtime, section.options)
    except BuildError as e:
        raise RecipeError(
            e.problem, where=f"{at}.{e.where}", accepted=e.accepted, fix=e.fix
        ) from None
