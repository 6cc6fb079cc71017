"""Checks of a recipe before any work: `read` reads a recipe file and runs the ordered list over it.

Called by `check`, `plan`, `run`, `step` and `lock`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from optimizer.foundation.yaml_lines import Lines
from optimizer.harness.process.collection import delay_collection
from optimizer.recipe.schema import Recipe
from optimizer.store import STAGES


@delay_collection()
def read(
    file: Path,
    overrides: Sequence[str],
    *,
    fetch: bool,
    early: bool = False,
    lock: Path | None = None,
    until: str = STAGES[-1],
) -> tuple[Recipe, Lines]:
    """Read a recipe file and check it before any work; return (recipe, lines of the file on which
    its values stand).

    file: the recipe
    overrides: "a.b=c", as given to --set
    fetch, early, lock, until: see context.Context

    Raises RecipeError, CheckpointError, DataError or MachineError: the first error found, with all
    others in its `further`. If the schema refuses the recipe, the model's files and the data are
    still checked where their own sections are valid.
    """
    from optimizer.checks import addresses
    from optimizer.harness.process.temporary import check_place
    from optimizer.recipe import file as recipe_file

    addresses.check()  # this and the next: before libraries are imported, which need both
    check_place()
    from optimizer.foundation.errors import OptimizeError, RecipeError, join

    document, lines = recipe_file.read_document(file, overrides)
    try:
        recipe = recipe_file.validate(file, document, lines)
    except RecipeError as refused:
        try:
            model, specs = recipe_file.select_valid_parts(document)
            from optimizer.checks import ordered  # imports torch, which takes seconds

            with recipe_file.locate_errors(lines):
                ordered.check_parts(model, specs)
        except OptimizeError as others:
            raise join([refused, others]) or refused from None
        raise
    from optimizer.checks import ordered
    from optimizer.checks.context import Context

    with recipe_file.locate_errors(lines):
        ordered.check(recipe, Context(early, fetch, until, file, lock))
    return recipe, lines
