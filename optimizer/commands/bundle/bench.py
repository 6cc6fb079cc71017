"""Command `optimize bench`."""

from __future__ import annotations

from pathlib import Path

import click

from optimizer.commands.harness import HarnessCommand, harness


@click.command(cls=HarnessCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.pass_obj
def bench(obj: dict[str, bool], bundle: Path, arguments: tuple[str, ...]) -> None:
    """Time BUNDLE on this machine, end to end and per stage.

    \b
    Example:
      optimize bench artifacts/minilm-int8/1 --batch 1 8 --sequence 128
    """
    harness("bench", bundle, arguments, obj["json"])
