"""Command `optimize serve`."""

from __future__ import annotations

from pathlib import Path

import click

from optimizer.commands.harness import PASS_ON, harness


@click.command(context_settings=PASS_ON)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def serve(obj: dict[str, bool], bundle: Path, arguments: tuple[str, ...]) -> None:
    """Serve BUNDLE over HTTP until SIGTERM.

    \b
    Example:
      optimize serve artifacts/minilm-int8/1 --port 8000
    """
    harness("serve", bundle, arguments, obj["json"])
