"""Command `optimize web`."""

from __future__ import annotations

from pathlib import Path

import click

from optimizer.commands.harness import HarnessCommand, harness


@click.command(cls=HarnessCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.pass_obj
def web(obj: dict[str, bool], bundle: Path, arguments: tuple[str, ...]) -> None:
    """Serve the page of BUNDLE to browsers.

    The browser runs the model; BUNDLE needs target onnxruntime-web.

    \b
    Example:
      optimize web artifacts/minilm-int8-web/1 --port 8000
    """
    harness("web", bundle, arguments, obj["json"])
