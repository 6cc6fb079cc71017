"""Command `optimize plan`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import click

from optimizer.commands.options import with_recipe
from optimizer.commands.release.publish import Access, open_place, with_registry
from optimizer.foundation.progress import say, show


@click.command()
@with_recipe
@with_registry
@click.pass_obj
def plan(
    obj: dict[str, bool],
    recipe: Path,
    overrides: tuple[str, ...],
    store: Path,
    access: Access,
) -> None:
    """Predict the steps, memory, disk and time of RECIPE.

    Prints each step with the reason why it runs, and whether the addresses that RECIPE publishes to
    respond. Writes nothing.

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
    with recipe_file.located(lines):
        pipeline.run(resolved, dry)
        entries = predictions.document(dry)
        for address in stage.check(resolved.publish):
            place = partial(open_place, access=access)
            why = stage.describe_tag(address, resolved.package.version, place)
            entries.append({"stage": "publish", "what": "ask", "why": why, "address": str(address)})
    if load := busy.describe():
        say(f"plan: this machine is busy ({load}); times are predicted for a quiet machine")
    try:
        room.check(entries, store, room.memory_of_this_machine())
    except MachineError as e:
        say(f"plan: run would refuse this: {e}")
    show(json.dumps(entries, indent=1) if obj["json"] else predictions.text(entries))
