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
    from optimizer.commands import predictions
    from optimizer.recipe import file as recipe_file
    from optimizer.store import Store

    dry = Store(store, dry=True)
    checked, lines = recipe_file.read_with_lines(recipe, overrides)
    with recipe_file.located(lines):
        pipeline.run(checked, dry)
        entries = predictions.document(checked, dry)
    show(json.dumps(entries, indent=1) if obj["json"] else predictions.text(entries))
