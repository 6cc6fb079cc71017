"""Check, from both configs alone, that a student can use the reference's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from optimizer.foundation.errors import OptimizeError, RecipeError
from optimizer.load.config.config import peek_config
from optimizer.recipe.schema import Model, Recipe

PLACE, SIZE = "reduce.student", "vocab_size"


@contextmanager
def report_at_student() -> Iterator[None]:
    """Report the load stage's errors at the student's place in the recipe."""
    try:
        yield
    except OptimizeError as e:
        where = e.where.replace("model.", f"{PLACE}.", 1)
        place = where if where.startswith(PLACE) else f"{PLACE}: {where}"
        raise type(e)(e.problem, where=place, accepted=e.accepted, fix=e.fix) from e


def check(recipe: Recipe, *, fetch: bool) -> None:
    """Raise RecipeError for a student whose vocabulary is of another size than the model's. fetch:
    True to fetch configs from a hub, False to compare only those on this machine."""
    student = recipe.reduce.student if recipe.reduce else None
    if student is None or recipe.model.gguf_file is not None:
        return
    fields = student.model_dump(include={"source", "revision", "subfolder"})
    with report_at_student():
        student_config = peek_config(
            Model(task=recipe.model.task, base=student.base, **fields), fetch=fetch
        )
    model_config = peek_config(recipe.model, fetch=fetch)
    if student_config is None or model_config is None:
        return
    sizes = [config.get(SIZE) for _, config in (student_config, model_config)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise RecipeError(
            f"the student's vocabulary has {sizes[0]} tokens ({student_config[0]}), the model has "
            f"{sizes[1]} ({model_config[0]}), so token ids differ",
            where=PLACE,
            accepted="a model with the reference's tokenizer",
            fix="Use a student with the reference's vocabulary.",
        )
