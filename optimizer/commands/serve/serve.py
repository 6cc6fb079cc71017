"""Command `optimize serve`."""

from __future__ import annotations

from pathlib import Path

import click

from optimizer.commands.harness import HarnessCommand, harness


@click.command(cls=HarnessCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.pass_obj
def serve(obj: dict[str, bool], bundle: Path, arguments: tuple[str, ...]) -> None:
    """Serve BUNDLE over HTTP until SIGTERM.

    \b
    Example:
      optimize serve artifacts/minilm-int8/1 --port 8000
    """
    harness("serve", bundle, arguments, obj["json"])
