"""Check a recipe's options for a product of the TensorRT family."""

from __future__ import annotations

from optimizer.foundation.errors import RecipeError
from optimizer.harness.errors import BuildError
from optimizer.harness.runtimes.trt.products import refuse_options
from optimizer.recipe.schema import Recipe, TensorRTTarget


def check(_recipe: Recipe, section: TensorRTTarget, at: str) -> None:
    """Refuse a recipe's TensorRT target: raise RecipeError for an option that TensorRT's builder
    would drop silently."""
    try:
        refuse_options(section.runtime, section.options)
    except BuildError as e:
        raise RecipeError(
            e.problem, where=f"{at}.{e.where}", accepted=e.accepted, fix=e.fix
        ) from None
