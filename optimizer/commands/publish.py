"""The commands `optimize publish`, `optimize pull` and `optimize versions`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from optimizer.commands.options import with_debug_and_json, with_policy
from optimizer.progress import show

if TYPE_CHECKING:
    from optimizer.publish.address import Address
    from optimizer.publish.place import Place

F = TypeVar("F", bound=Callable[..., Any])


def with_registry(command: F) -> F:
    """How a registry is reached."""
    command = click.option(
        "--docker-config",
        type=click.Path(path_type=Path),
        default="~/.docker",
        envvar="DOCKER_CONFIG",
        show_default=True,
        help="Folder of the config.json that `docker login` writes.",
    )(command)
    return click.option(
        "--plain-http", is_flag=True, help="HTTP to a registry that is not on this machine, too."
    )(command)


@click.command()
@with_debug_and_json
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("address")
@click.option("--replace", is_flag=True, help="Let a tag that names another bundle name this one.")
@with_registry
@click.pass_obj
def publish(
    obj: dict[str, bool],
    bundle: Path,
    address: str,
    replace: bool,
    plain_http: bool,
    docker_config: Path,
) -> None:
    """Publish the folder BUNDLE, and its signature, bill of materials and provenance where they lie
    beside it, to ADDRESS: oci://HOST/NAME[:TAG], or oci-layout:FOLDER[:TAG]. The tag is the
    bundle's version unless it is given, and is written last; what is there already is not sent.

    \b
    Examples:
      optimize publish artifacts/minilm-int8/1 oci://registry.example.com/models/minilm
      optimize publish artifacts/minilm-int8/1 oci://localhost:5000/minilm:1
      optimize publish artifacts/minilm-int8/1 oci-layout:usb-stick/minilm:1
    """
    from dataclasses import replace as changed

    from optimizer.harness.manifest import read_manifest
    from optimizer.publish.push import as_document, push

    with opened(address, docker_config, plain_http) as (parsed, place):
        tag = parsed.tag or str(read_manifest(bundle)["version"])
        if parsed.digest:
            raise click.UsageError("ADDRESS names a digest; give a tag, or none.")
        receipt = push(bundle, place, tag, replace=replace)
    at = changed(parsed, tag=tag, digest=receipt.digest)
    text = f"{at}\n{receipt.sent:,} bytes sent, {receipt.shared:,} were there already"
    show(json.dumps(as_document(receipt, str(at))) if obj["json"] else text)


@click.command()
@with_debug_and_json
@click.argument("address")
@click.option(
    "--to",
    "folder",
    type=click.Path(path_type=Path),
    help="The new folder.  [default: artifacts/NAME/VERSION]",
)
@with_policy
@with_registry
@click.pass_obj
def pull(
    obj: dict[str, bool],
    address: str,
    folder: Path | None,
    key: Path | None,
    at_least: str | None,
    plain_http: bool,
    docker_config: Path,
) -> None:
    """Fetch the bundle at ADDRESS: oci://HOST/NAME:TAG or oci-layout:FOLDER:TAG, either with
    @sha256:DIGEST. Its folder appears complete and verified, or not at all; a run that was killed
    leaves what it had to the next one.

    \b
    Examples:
      optimize pull oci://registry.example.com/models/minilm:1
      optimize pull oci://localhost:5000/minilm:1 --require-signature public.pem --to /srv/minilm
    """
    from optimizer.publish.pull import pull as fetch

    with opened(address, docker_config, plain_http) as (parsed, place):
        pulled = fetch(place, parsed, folder, key, at_least)
    document = {**vars(pulled), "folder": str(pulled.folder), "attached": [*pulled.attached]}
    signed = f", signed by the key {pulled.key[:16]}..." if pulled.key else ""
    text = f"{pulled.folder}: {pulled.digest}{signed}"
    show(json.dumps({"exit_code": 0, **document}) if obj["json"] else text)


@click.command()
@with_debug_and_json
@click.argument("address")
@with_registry
@click.pass_obj
def versions(obj: dict[str, bool], address: str, plain_http: bool, docker_config: Path) -> None:
    """List the tags at ADDRESS and the digests that they name.

    \b
    Example:
      optimize versions oci://localhost:5000/minilm
    """
    from optimizer.publish.place import digest_of

    with opened(address, docker_config, plain_http) as (_, place):
        tags = [tag for tag in place.tags() if not tag.endswith(".history")]
        read = {tag: place.read_manifest(tag) for tag in tags}
    named = {tag: digest_of(data) for tag, data in read.items() if data is not None}
    lines = [f"{digest}  {tag}" for tag, digest in named.items()]
    document = {"exit_code": 0, "address": address, "versions": named}
    show(json.dumps(document) if obj["json"] else "\n".join(lines) or "there is none yet")


@contextmanager
def opened(address: str, docker_config: Path, plain_http: bool) -> Iterator[tuple[Address, Place]]:
    from optimizer.publish.address import parse
    from optimizer.publish.places import place_of

    parsed = parse(address)
    with closing(place_of(parsed, docker_config.expanduser(), plain=plain_http)) as place:
        yield parsed, place
