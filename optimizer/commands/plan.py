"""The command `optimize plan`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.commands.options import with_recipe
from optimizer.progress import show


@click.command()
@with_recipe
@click.pass_obj
def plan(obj: dict[str, bool], recipe: Path, overrides: tuple[str, ...], store: Path) -> None:
    """Say which steps of RECIPE would run and why, and the memory, disk and time they need.

    \b
    Example:
      optimize plan recipes/minilm-int8.yaml
    """
    from optimizer import pipeline
    from optimizer.commands import checked, predictions
    from optimizer.recipe import file as recipe_file
    from optimizer.store import Store

    dry = Store(store, dry=True)
    resolved, lines = checked.read(recipe, overrides, fetch=True)
    with recipe_file.located(lines):
        pipeline.run(resolved, dry)
        entries = predictions.document(dry)
    show(json.dumps(entries, indent=1) if obj["json"] else predictions.text(entries))
