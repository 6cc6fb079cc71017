"""Commands `optimize publish`, `optimize pull` and `optimize versions`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from optimizer.commands.options import with_debug_and_json, with_policy
from optimizer.foundation.progress import show
from optimizer.harness.shown import escape_line

if TYPE_CHECKING:
    from optimizer.publish.address import BundleAddress
    from optimizer.publish.hubs.folders import Folders
    from optimizer.publish.registries.place import Place

R = TypeVar("R")


@dataclass(frozen=True)
class Access:
    """Access to registries: the options of `with_registry`."""

    docker_config: Path | None
    plain_http: bool
    hf_endpoint: str | None
    token_services: tuple[str, ...] = ()


def with_registry(command: Callable[..., R]) -> Callable[..., R]:
    """Add options for access to registries to a command of `optimize`, which gets `access`."""

    @click.option(
        "--hf-endpoint",
        metavar="URL",
        envvar="HF_ENDPOINT",
        help="Server of hf:// addresses.  [default: the Hugging Face Hub]",
    )
    @click.option(
        "--docker-config",
        type=click.Path(path_type=Path),
        default="~/.docker",
        envvar="DOCKER_CONFIG",
        show_default=True,
        help="Folder with the config.json written by `docker login`.",
    )
    @click.option("--plain-http", is_flag=True, help="Allow HTTP to a registry on another machine.")
    @click.option(
        "--token-service",
        "token_services",
        multiple=True,
        metavar="HOST[:PORT]",
        help="Token service in another domain that may receive the registry's password "
        "(https only); repeatable.",
    )
    @wraps(command)
    def with_access(
        *args: Any,
        docker_config: Path,
        plain_http: bool,
        hf_endpoint: str | None,
        token_services: tuple[str, ...],
        **kwargs: Any,
    ) -> R:
        try:
            kept: Path | None = docker_config.expanduser()
        except RuntimeError:  # a user without a home folder
            kept = None
        access = Access(kept, plain_http, hf_endpoint, token_services)
        return command(*args, access=access, **kwargs)

    return with_access


@click.command()
@with_debug_and_json
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("address")
@click.option("--replace", is_flag=True, help="Move a tag that names another bundle to this one.")
@click.option(
    "--new-model", is_flag=True, help="Publish where bundles of another model or task are."
)
@with_registry
@click.pass_obj
def publish(
    obj: dict[str, bool],
    bundle: Path,
    address: str,
    replace: bool,
    new_model: bool,
    access: Access,
) -> None:
    """Publish the folder BUNDLE to ADDRESS.

    Its signature, bill of materials and provenance are included if present. ADDRESS:
    oci://HOST/NAME[:TAG], oci-layout:FOLDER[:TAG], hf://OWNER/NAME[:TAG], mlflow:[URI#]NAME[:TAG],
    or s3://, gs:// or az://BUCKET/PREFIX[:TAG]. Default tag: the bundle's version. The tag is
    written last; files already at ADDRESS are not sent again.

    \b
    Examples:
      optimize publish artifacts/minilm-int8/1 oci://registry.example.com/models/minilm
      optimize publish artifacts/minilm-int8/1 oci://localhost:5000/minilm:1
      optimize publish artifacts/minilm-int8/1 oci-layout:usb-stick/minilm:1
      optimize publish artifacts/minilm-int8/1 hf://my-org/minilm-int8
      optimize publish artifacts/minilm-int8/1 mlflow:minilm-int8
    """
    from dataclasses import replace as changed

    from optimizer.harness.bundle.manifest import read_manifest
    from optimizer.publish.push import build_document, push

    with open_place(address, access) as (parsed, place):
        tag = parsed.tag or str(read_manifest(bundle)["version"])
        if parsed.digest:
            raise click.UsageError(
                "ADDRESS has a digest, which follows from the bundle; give a tag, or neither."
            )
        receipt = push(bundle, place, tag, replace=replace, new_model=new_model)
    at = changed(parsed, tag=tag, digest=receipt.digest)
    text = f"{escape_line(str(at))}\n{receipt.sent:,} bytes sent, {receipt.shared:,} already there"
    show(json.dumps(build_document(receipt, str(at))) if obj["json"] else text)


@click.command()
@with_debug_and_json
@click.argument("address")
@click.option(
    "--to",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder to create.  [default: artifacts/NAME/VERSION]",
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
    access: Access,
) -> None:
    """Fetch the bundle at ADDRESS.

    ADDRESS: oci://HOST/NAME:TAG, oci-layout:FOLDER:TAG,
    hf://OWNER/NAME:TAG or mlflow:[URI#]NAME:TAG, each optionally with @sha256:DIGEST. Its folder
    appears complete and verified, or not at all; after a killed run the next one resumes.

    \b
    Examples:
      optimize pull oci://registry.example.com/models/minilm:1
      optimize pull oci://localhost:5000/minilm:1 --require-signature public.pem --to /srv/minilm
    """
    from optimizer.publish.pull import pull as fetch

    with open_place(address, access) as (parsed, place):
        pulled = fetch(place, parsed, folder, key, at_least)
    document = {**vars(pulled), "folder": str(pulled.folder), "attached": [*pulled.attached]}
    signed = f", signed by the key {pulled.key[:16]}..." if pulled.key else ""
    text = escape_line(f"{pulled.folder}: {pulled.digest}{signed}")
    show(json.dumps({"exit_code": 0, **document}) if obj["json"] else text)


@click.command()
@with_debug_and_json
@click.argument("address")
@with_registry
@click.pass_obj
def versions(obj: dict[str, bool], address: str, access: Access) -> None:
    """List the tags at ADDRESS and the digests they name.

    \b
    Example:
      optimize versions oci://localhost:5000/minilm
    """
    from optimizer.foundation.buckets.blob import digest_of

    with open_place(address, access) as (_, place):
        tags = [tag for tag in place.tags() if not tag.endswith(".history")]
        read = {tag: place.read_manifest(tag) for tag in tags}
    named = {tag: digest_of(data) for tag, data in read.items() if data is not None}
    lines = [f"{digest}  {escape_line(tag)}" for tag, digest in named.items()]
    document = {"exit_code": 0, "address": address, "versions": named}
    show(
        json.dumps(document)
        if obj["json"]
        else "\n".join(lines) or "no version is published here yet"
    )


@contextmanager
def open_place(address: str, access: Access) -> Iterator[tuple[BundleAddress, Place | Folders]]:
    """Open the address that a command is given: yield the parsed address and the client of its
    place, which is closed at the end."""
    from optimizer.publish.address import parse
    from optimizer.publish.registries.places import make_place

    parsed = parse(address)
    place = make_place(
        parsed,
        access.docker_config,
        plain=access.plain_http,
        hub=access.hf_endpoint,
        token_services=access.token_services,
    )
    with closing(place):
        yield parsed, place
