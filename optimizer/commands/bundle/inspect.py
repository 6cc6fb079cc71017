"""Command `optimize inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.foundation.progress import show


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.pass_obj
def inspect(obj: dict[str, bool], bundle: Path) -> None:
    """Show the contents of BUNDLE.

    \b
    Example:
      optimize inspect artifacts/minilm-int8/1
    """
    from optimizer.commands.bundle import look

    document = look.inspect(bundle)
    show(json.dumps(document, indent=1) if obj["json"] else look.inspect_text(document))
    raise SystemExit(look.exit_code(document))
