"""Refuse the metric cosine for a model whose output is a single number."""

from __future__ import annotations

from optimizer.checks.context import Context
from optimizer.foundation.errors import RecipeError
from optimizer.harness import tasks
from optimizer.load.config.config import peek_config
from optimizer.recipe.schema import Recipe


def check(recipe: Recipe, context: Context) -> None:
    """Check a recipe before a run: raise RecipeError for a gate of cosine where config.json has one
    label. The cosine of two numbers is 1 or -1, so the gate would pass almost any output."""
    task, section = tasks.find_task(recipe.model.task), recipe.validate_
    if not task.classifies or task.per_position:
        return
    known = peek_config(recipe.model, fetch=context.fetch)
    labels = known[1].get("id2label") if known else None
    if not isinstance(labels, dict) or len(labels) != 1:
        return
    for field, used in (
        ("metric", section.metric == "cosine"),
        ("min_cosine", section.min_cosine is not None),
    ):
        if used:
            raise RecipeError(
                "cosine compares directions, and the model answers with one number, whose cosine "
                "is 1 or -1",
                where=f"validate.{field}",
                accepted="metric spearman with a column for score, without min_cosine"
                if "spearman" in task.metrics
                else f"metric {', '.join(m for m in task.metrics if m != 'cosine')}",
            )
