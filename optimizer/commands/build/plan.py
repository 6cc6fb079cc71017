"""Command `optimize plan`."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimizer.commands.options import with_recipe
from optimizer.commands.release.publish import Access, open_place, with_registry
from optimizer.foundation.progress import say, show
from optimizer.shared_store import Root, folder_of

if TYPE_CHECKING:
    from optimizer.recipe.schema import Recipe


@click.command()
@with_recipe
@with_registry
@click.pass_obj
def plan(
    obj: dict[str, bool],
    recipe: Path,
    overrides: tuple[str, ...],
    store: Root,
    access: Access,
) -> None:
    """Predict the steps, memory, disk and time of RECIPE.

    Prints each step with the reason why it runs, whether the addresses that RECIPE publishes to
    respond, and what `optimize search` would try. Writes nothing.

    \b
    Example:
      optimize plan recipes/minilm-int8.yaml
    """
    from optimizer import checks, pipeline
    from optimizer.commands.build import predictions, room
    from optimizer.foundation.errors import MachineError
    from optimizer.foundation.process import busy
    from optimizer.publish import stage
    from optimizer.recipe import file as recipe_file
    from optimizer.store import Store

    dry = Store(store, dry=True)
    resolved, lines = checks.read(recipe, overrides, fetch=True, early=True)
    with recipe_file.locate_errors(lines):
        pipeline.run(resolved, dry)
        entries = predictions.build_document(dry)
        for address in stage.check(resolved.publish):
            place = partial(open_place, access=access)
            why = stage.describe_tag(address, resolved.package.version, place)
            entries.append({"stage": "publish", "what": "ask", "why": why, "address": str(address)})
        if resolved.search is not None:
            entries.append(_searched(resolved, store))
    if load := busy.describe():
        say(f"plan: this machine is busy ({load}); times are predicted for a quiet machine")
    try:
        room.check(entries, store, room.read_memory_limit())
    except MachineError as e:
        say(f"plan: run would refuse this: {e}")
    show(json.dumps(entries, indent=1) if obj["json"] else predictions.format_entries(entries))


def _searched(recipe: Recipe, store: Root) -> dict[str, Any]:
    """Return the plan's entry on `optimize search`: its candidates, and the time to make them."""
    from optimizer import pipeline
    from optimizer.commands.build import predictions
    from optimizer.load_test import highest_rate
    from optimizer.search import candidates
    from optimizer.store import Store

    assert recipe.search is not None
    space, budget = candidates.list_candidates(recipe), recipe.search.budget
    seconds_of: dict[object, float] = {}
    for candidate in space:
        uniform = replace(candidate, finer=0.0)
        if uniform not in seconds_of:
            dry = Store(folder_of(store) / "nothing-finished", dry=True, until="build")
            pipeline.run(candidates.derive_recipe(recipe, uniform), dry)
            seconds_of[uniform] = sum(
                e.get("seconds", 0.0) for e in predictions.build_document(dry)
            )
    each = budget.find_seconds_of_timing(len(space)) if recipe.search.timed else 0.0
    tried = [replace(c, finer=0.0) for c in space[: budget.trials]]
    seconds = sum(seconds_of[uniform] + each for uniform in tried)
    served = ""
    if recipe.search.over.server and recipe.slo is not None:
        fewest, most = highest_rate.RUNS
        served = (
            f", then {fewest} to {most} runs of {recipe.slo.seconds:g} s per setting of the server "
            "tried"
        )
    return {
        "stage": "search",
        "what": "try",
        "why": f"`optimize search`: {len(space)} candidates by {recipe.search.objective}. It ends "
        f"after {budget.trials} trials or {60 * budget.hours:g} min, whichever comes first. Making "
        f"and timing {len(tried)} candidates takes up to {seconds / 60:.0f} min; answering half of "
        "validate.data with each comes on top" + served,
        "candidates": [candidate.label(recipe) for candidate in space],
        "search_seconds": seconds,
    }
