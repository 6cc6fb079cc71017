"""The command `optimize compare`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.progress import show


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.pass_obj
def compare(obj: dict[str, bool], a: Path, b: Path) -> None:
    """Show how bundles A and B differ: recipe, quality, speed, size.

    \b
    Example:
      optimize compare artifacts/minilm-int8/1 artifacts/minilm-int8/2
    """
    from optimizer.commands import look

    document = look.compare(a, b)
    show(json.dumps(document, indent=1) if obj["json"] else look.compare_text(document))
