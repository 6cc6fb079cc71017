"""A recipe read and checked as far as it can be before any work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from optimizer.foundation.yaml_lines import Lines
from optimizer.recipe.schema import Recipe


def read(
    recipe: Path, overrides: Sequence[str], *, fetch: bool, lock: Path | None = None
) -> tuple[Recipe, Lines]:
    """The recipe and where its values stand: by the schema, its targets, and the configs of its
    model and student (of one on a hub only where `fetch`), and by a lock. Raises RecipeError,
    CheckpointError, MachineError."""
    from optimizer.checks import addresses
    from optimizer.harness.process.temporary import check_place
    from optimizer.recipe import file as recipe_file

    addresses.check()
    check_place()  # libraries want one as soon as they are imported
    from optimizer.checks import covered, lengths, target_models
    from optimizer.load.tokenizer import student_vocabulary

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
