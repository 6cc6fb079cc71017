"""Can a student have the reference's tokenizer? Of both configs alone."""

from __future__ import annotations

from optimizer.errors import RecipeError
from optimizer.load import source
from optimizer.load.checkpoint import read_json
from optimizer.load.config import model_folder
from optimizer.recipe.schema import Model, Recipe

SIZE = "vocab_size"


def check(recipe: Recipe, *, fetch: bool) -> None:
    """Raise RecipeError for a student whose vocabulary is of another size than the model's. fetch:
    also look at configs that are on a hub; else only at those on this machine."""
    student = recipe.reduce.student if recipe.reduce else None
    if student is None or recipe.model.gguf_file is not None:
        return
    own = student.model_dump(include={"source", "revision", "subfolder"})
    sections = [Model(task=recipe.model.task, **own), recipe.model]
    if not fetch and not all(source.is_local(s.source) for s in sections):
        return
    files = [model_folder(source.peek(s).folder) / "config.json" for s in sections]
    sizes = [read_json(file).get(SIZE) for file in files]
    if None not in sizes and sizes[0] != sizes[1]:
        raise RecipeError(
            f"the student's vocabulary has {sizes[0]} tokens ({files[0]}) and the model's "
            f"{sizes[1]} ({files[1]}), so a token is not the same in both",
            where="reduce.student",
            accepted="a model with the reference's tokenizer",
            fix="Use a student of the reference's own vocabulary.",
        )
