"""Can a student have the reference's tokenizer? Of both configs alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from optimizer.foundation.errors import OptimizeError, RecipeError
from optimizer.load.config.config import at_hand
from optimizer.recipe.schema import Model, Recipe

PLACE, SIZE = "reduce.student", "vocab_size"


@contextmanager
def named_as_student() -> Iterator[None]:
    """What load says of a model, at its place in the recipe, is said of the student."""
    try:
        yield
    except OptimizeError as e:
        where = e.where.replace("model.", f"{PLACE}.", 1)
        own = where if where.startswith(PLACE) else f"{PLACE}: {where}"
        raise type(e)(e.problem, where=own, accepted=e.accepted, fix=e.fix) from e


def check(recipe: Recipe, *, fetch: bool) -> None:
    """Raise RecipeError for a student whose vocabulary is of another size than the model's. fetch:
    also look at configs that are on a hub; else only at those on this machine."""
    student = recipe.reduce.student if recipe.reduce else None
    if student is None or recipe.model.gguf_file is not None:
        return
    own = student.model_dump(include={"source", "revision", "subfolder"})
    with named_as_student():
        mine = at_hand(Model(task=recipe.model.task, **own), fetch=fetch)
    theirs = at_hand(recipe.model, fetch=fetch)
    if mine is None or theirs is None:
        return
    sizes = [config.get(SIZE) for _, config in (mine, theirs)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise RecipeError(
            f"the student's vocabulary has {sizes[0]} tokens ({mine[0]}) and the model's "
            f"{sizes[1]} ({theirs[0]}), so a token is not the same in both",
            where=PLACE,
            accepted="a model with the reference's tokenizer",
            fix="Use a student of the reference's own vocabulary.",
        )
