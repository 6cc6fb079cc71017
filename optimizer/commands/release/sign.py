"""Command `optimize sign`."""

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
    required=True,
    help="Private key, a PEM file: NIST P-256, P-384 or P-521.",
)
@click.option(
    "--signature",
    type=click.Path(path_type=Path),
    help="File to write.  [default: BUNDLE.sig, beside the folder]",
)
@click.pass_obj
def sign(obj: dict[str, bool], bundle: Path, key: Path, signature: Path | None) -> None:
    """Sign the folder BUNDLE.

    Signs every file, including the manifest, in sigstore's model-signing format, which
    `model_signing verify key` also reads. The bundle does not change.

    \b
    Examples:
      openssl ecparam -name prime256v1 -genkey -noout -out private.pem
      openssl ec -in private.pem -pubout -out public.pem
      optimize sign artifacts/minilm-int8/1 --key private.pem
      optimize check artifacts/minilm-int8/1 --require-signature public.pem
    """
    from optimizer.harness.trust.signature import signature_path
    from optimizer.publish.documents.sign import sign as sign_bundle

    file = signature or signature_path(bundle.resolve())
    hint = sign_bundle(bundle, key, file)
    document = {"exit_code": 0, "bundle": str(bundle), "signature": str(file), "key": hint}
    text = escape_line(f"{file}: signed by the key {hint[:16]}...")
    show(json.dumps(document) if obj["json"] else text)
