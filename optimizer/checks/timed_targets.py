"""Refuse goal.latency_gain on a target that this toolchain cannot time."""

from __future__ import annotations

from optimizer import targets
from optimizer.checks.context import Context
from optimizer.foundation.errors import RecipeError
from optimizer.recipe.schema import Recipe


def check(recipe: Recipe, _: Context) -> None:
    """Check a recipe before a run: raise RecipeError where reduce.measure_on is not the index of a
    target that can be timed, and where `reduce.gain_over: float` names a target that has no float
    model to compare with."""
    if recipe.reduce is None or recipe.reduce.latency_gain is None:
        return
    place, sections = recipe.reduce.measure_on, recipe.targets
    timed = [i for i, t in enumerate(sections) if not targets.look_up(t.runtime).untimed]
    accepted = ", ".join(f"{i} ({sections[i].name})" for i in timed)
    if place >= len(sections):
        listed = ", ".join(f"{i} ({t.name})" for i, t in enumerate(sections))
        raise RecipeError(
            f"target {place} does not exist; targets has {listed}",
            where="reduce.measure_on",
            accepted=accepted,
        )
    if place not in timed:
        why = targets.look_up(sections[place].runtime).untimed
        others = ", ".join(n for n in targets.list_names() if not targets.look_up(n).untimed)
        raise RecipeError(
            f"{place} is target {sections[place].name}, which is not timed: {why}",
            where="reduce.measure_on",
            accepted=accepted or "the index of a target that is timed",
            fix="" if accepted else f"Use goal: {{keep: ...}}, or add a target of {others}.",
        )
    if recipe.reduce.gain_over == "float" and sections[place].export is None:
        raise RecipeError(
            f"float, and target {sections[place].name} has no float baseline to compare with",
            where="reduce.gain_over",
            accepted="same_form",
        )
