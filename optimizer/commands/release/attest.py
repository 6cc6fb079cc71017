"""Command `optimize attest`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.commands.options import with_debug_and_json
from optimizer.foundation.progress import show
from optimizer.harness.shown import escape_line


@click.command()
@with_debug_and_json
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--key",
    type=click.Path(path_type=Path),
    help="Private key (PEM) to sign the provenance with.",
)
@click.pass_obj
def attest(obj: dict[str, bool], bundle: Path, key: Path | None) -> None:
    """Write a bill of materials and a provenance.

    Both are written next to the folder BUNDLE: BUNDLE.sbom.json (CycloneDX 1.6 with a model card)
    and BUNDLE.provenance.json (in-toto, SLSA provenance v1).

    \b
    Examples:
      optimize attest artifacts/minilm-int8/1
      optimize attest artifacts/minilm-int8/1 --key private.pem
    """
    from optimizer.publish.documents.attest import attest as write

    parts, how = write(bundle, key)
    document = {"exit_code": 0, "bundle": str(bundle), "sbom": str(parts), "provenance": str(how)}
    text = "\n".join(escape_line(str(file)) for file in (parts, how))
    show(json.dumps(document) if obj["json"] else text)
