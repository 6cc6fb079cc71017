"""The command `optimize web`."""

from __future__ import annotations

from pathlib import Path

import click

from optimizer.commands.harness import PASS_ON, harness


@click.command(context_settings=PASS_ON)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def web(obj: dict[str, bool], bundle: Path, arguments: tuple[str, ...]) -> None:
    """Serve BUNDLE's page on this machine: its browser runs the model (target onnxruntime-web).

    \b
    Example:
      optimize web artifacts/minilm-int8-web/1 --port 8000
    """
    harness("web", bundle, arguments, obj["json"])
