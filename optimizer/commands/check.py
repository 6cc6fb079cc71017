"""The command `optimize check`."""

from __future__ import annotations

from pathlib import Path

import click

from optimizer.commands.options import with_recipe
from optimizer.progress import show


@click.command()
@with_recipe
@click.pass_obj
def check(obj: dict[str, bool], recipe: Path, overrides: tuple[str, ...], store: Path) -> None:
    """Check RECIPE against the schema, its targets, and the columns of its local data, reading no
    weights.

    \b
    Example:
      optimize check recipes/minilm-int8.yaml
    """
    del store
    from optimizer.load.datasets import check_header
    from optimizer.recipe import file as recipe_file
    from optimizer.recipe.schema import data_specs

    checked = recipe_file.read(recipe, overrides)
    for spec in data_specs(checked.calibrate, checked.validate_).values():
        check_header(spec)
    names = [t.runtime for t in checked.targets]
    if obj["json"]:
        show(checked.model_dump_json(by_alias=True, indent=1))
    else:
        show(f"{recipe}: fine. Targets: {', '.join(names)}.")
