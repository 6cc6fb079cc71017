"""Command `optimize doctor`: list the targets, and a bundle's engines, that run on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.foundation.progress import show


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
@click.pass_obj
def doctor(obj: dict[str, bool], bundle: Path | None) -> None:
    """List the targets that this machine can run.

    Shows which can be built, which can be run, and the pip command for missing packages; with
    BUNDLE also which of its engines run here, and why.

    \b
    Example:
      optimize doctor
      optimize doctor artifacts/minilm-int8/1
    """
    from optimizer.commands.bundle import examine

    document = examine.examine()
    if bundle is not None:
        document["engines"] = examine.examine_engines(bundle)
    show(json.dumps(document, indent=1) if obj["json"] else examine.format_document(document))
