"""A recipe read and checked as far as it can be before any work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from optimizer.recipe.schema import Recipe
from optimizer.yaml_lines import Lines


def read(
    recipe: Path, overrides: Sequence[str], *, fetch: bool, lock: Path | None = None
) -> tuple[Recipe, Lines]:
    """The recipe and where its values stand: by the schema, its targets, and the configs of its
    model and student (of one on a hub only where `fetch`), and by a lock. Raises RecipeError,
    CheckpointError, MachineError."""
    from optimizer.commands.room import check_addresses
    from optimizer.harness.temporary import check_place
    from optimizer.recipe import file as recipe_file

    check_addresses()
    check_place()  # libraries want one as soon as they are imported
    from optimizer.load import covered, lengths, student_vocabulary, target_models

    checked, lines = recipe_file.read_with_lines(recipe, overrides)
    with recipe_file.located(lines):
        covered.check(checked, fetch=fetch)
        lengths.check(checked, fetch=fetch)
        student_vocabulary.check(checked, fetch=fetch)
        target_models.check(checked, fetch=fetch)
        if lock is not None:
            from optimizer.package import lock as locks

            locks.check(recipe, checked, lock)
    return checked, lines
