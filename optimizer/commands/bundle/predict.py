"""Command `optimize predict`."""

from __future__ import annotations

from pathlib import Path

import click

from optimizer.commands.harness import PASS_ON, harness


@click.command(context_settings=PASS_ON)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def predict(obj: dict[str, bool], bundle: Path, arguments: tuple[str, ...]) -> None:
    """Print the outputs of BUNDLE.

    Inputs are arguments, or lines on stdin; options: `optimize predict BUNDLE --help`.

    \b
    Example:
      optimize predict artifacts/minilm-int8/1 "what a lovely film"
    """
    harness("predict", bundle, arguments, obj["json"])
