"""Commands `optimize seal` and `optimize open`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.commands.options import with_debug_and_json, with_policy
from optimizer.foundation.progress import show
from optimizer.harness.shown import escape_line


@click.command()
@with_debug_and_json
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--recipient",
    "recipients",
    multiple=True,
    required=True,
    help="Public key of age (age1...), or a file of such keys; repeatable: any of them opens it.",
)
@click.option(
    "--to",
    "file",
    type=click.Path(path_type=Path),
    help="File to write.  [default: BUNDLE.age, beside the folder]",
)
@click.option("--replace", is_flag=True, help="Replace an existing file.")
@click.pass_obj
def seal(
    obj: dict[str, bool],
    bundle: Path,
    recipients: tuple[str, ...],
    file: Path | None,
    replace: bool,
) -> None:
    """Encrypt the folder BUNDLE into one file.

    The file has the age format, and includes the bundle's signature and documents.

    \b
    Examples:
      age-keygen -o device.key
      optimize seal artifacts/minilm-int8/1 --recipient age1...
      optimize open artifacts/minilm-int8/1.age --identity device.key --to /srv/minilm
    """
    from optimizer.publish.documents.seal import seal as encrypt

    whole = bundle.resolve()
    default = whole.with_name(f"{whole.name}.age")
    into = encrypt(bundle, recipients, file or default, replace=replace)
    document = {"exit_code": 0, "bundle": str(bundle), "file": str(into)}
    show(json.dumps(document) if obj["json"] else escape_line(str(into)))


@click.command("open")
@with_debug_and_json
@click.argument("sealed", type=click.Path(path_type=Path))
@click.option(
    "--identity",
    type=click.Path(path_type=Path),
    required=True,
    help="File with the secret key, as written by age-keygen.",
)
@click.option(
    "--to", "folder", type=click.Path(path_type=Path), required=True, help="Folder to create."
)
@with_policy
@click.pass_obj
def unseal(
    obj: dict[str, bool],
    sealed: Path,
    identity: Path,
    folder: Path,
    key: Path | None,
    at_least: str | None,
) -> None:
    """Decrypt the file SEALED into a folder.

    Only you can read the folder, which appears complete and verified, or not at all.

    \b
    Example:
      optimize open artifacts/minilm-int8/1.age --identity device.key --to /srv/minilm
    """
    from optimizer.publish.documents.seal import unseal as decrypt

    hint = decrypt(sealed, identity, folder, key, at_least)
    signed = f", signed by the key {hint[:16]}..." if hint else ""
    document = {"exit_code": 0, "folder": str(folder), "key": hint}
    show(json.dumps(document) if obj["json"] else escape_line(f"{folder}{signed}"))
