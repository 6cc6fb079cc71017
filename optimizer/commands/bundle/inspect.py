"""Command `optimize inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.commands.options import with_debug_and_json
from optimizer.foundation.progress import show


@click.command()
@with_debug_and_json
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--files", is_flag=True, help="List every file with its size and digest.")
@click.pass_obj
def inspect(obj: dict[str, bool], bundle: Path, files: bool) -> None:
    """Show what BUNDLE is.

    Opens with six lines: bundle, task with inputs and outputs, quality, latency, size, and if and
    by which engine it runs on this machine. Every file is compared with its recorded digest.

    \b
    Examples:
      optimize inspect artifacts/minilm-int8/1
      optimize inspect artifacts/minilm-int8/1 --files
    """
    from optimizer.commands.bundle import look

    document = look.inspect(bundle)
    show(
        json.dumps(document, indent=1) if obj["json"] else look.inspect_text(document, files=files)
    )
    raise SystemExit(look.exit_code(document))
