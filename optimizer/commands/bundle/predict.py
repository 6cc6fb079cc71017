"""Command `optimize predict`."""

from __future__ import annotations

from pathlib import Path

import click

from optimizer.commands.harness import HarnessCommand, harness


@click.command(cls=HarnessCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[TEXT]...")
@click.pass_obj
def predict(obj: dict[str, bool], bundle: Path, arguments: tuple[str, ...]) -> None:
    """Print the outputs of BUNDLE.

    Inputs are the arguments after BUNDLE, or the lines of stdin.

    \b
    Example:
      optimize predict artifacts/minilm-int8/1 "what a lovely film"
    """
    harness("predict", bundle, arguments, obj["json"])
