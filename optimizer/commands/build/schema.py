"""Command `optimize schema`."""

from __future__ import annotations

import json

import click

from optimizer.foundation.progress import show


@click.command()
def schema() -> None:
    """Print the JSON schema of a recipe.

    \b
    Example:
      optimize schema > recipe.schema.json
    """
    from optimizer.recipe import schema as recipe

    show(json.dumps(recipe.build_json_schema(), indent=1))
