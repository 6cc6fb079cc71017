"""Publish a bundle whose gates passed to the addresses of the recipe; the last stage of a run.

This is the only stage with effects outside this machine: a rerun asks each place for its content
and sends the missing files. If one place fails, the others are still published to.
VERSION.published.json beside the bundle lists the addresses, for people and other tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer.foundation import atomic
from optimizer.foundation.buckets.blob import digest_of
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.progress import say
from optimizer.harness.bundle.manifest import read_manifest
from optimizer.harness.errors import ExplainedError
from optimizer.publish.address import BundleAddress, parse
from optimizer.publish.hubs.folders import Folders
from optimizer.publish.push import Receipt, push
from optimizer.publish.registries.layout import OciLayout
from optimizer.publish.registries.place import Json, Place
from optimizer.publish.registries.places import check_installed

OpenPlace = Callable[[str], AbstractContextManager[tuple[BundleAddress, Place | Folders]]]
"""Function that opens the place at an address, as a context manager."""
NOTE = ".published.json"  # suffix, after the name of the bundle's folder


@dataclass(frozen=True)
class Published:
    """Result of publishing a bundle to one address.

    address: address with its tag, and with its digest once published.
    error, fix: reason for not publishing, and advice.
    """

    address: str
    receipt: Receipt | None = None
    error: ExplainedError | None = None
    fix: str = ""

    def as_dict(self) -> Json:
        if self.receipt is not None:
            attached = [*self.receipt.attached]
            return {"address": self.address, **vars(self.receipt), "attached": attached}
        parts = self.error.as_dict() if self.error else {}
        code = self.error.exit_code if self.error else 0
        fix = f"{parts.get('fix', '')} {self.fix}".strip()
        return {"address": self.address, "exit_code": code, **parts, "fix": fix}

    @property
    def text(self) -> str:
        """One line on publishing to the address, for a person."""
        if self.error is None:
            return f"published: {self.address}"
        return f"not published: {self.error} {self.fix}"


def check(addresses: Sequence[str]) -> list[BundleAddress]:
    """Return the addresses that a recipe publishes to, parsed and checked without a network.

    Raises RecipeError for text that is not an address, has a digest, comes twice, or is a folder of
    something else; MachineError for a missing package.
    """
    parsed: list[BundleAddress] = []
    for i, text in enumerate(addresses):
        field = f"publish.{i}"
        try:
            address = parse(text)
            if address.folder is not None:
                OciLayout(address.folder)
            check_installed(address)
        except ExplainedError as e:
            where = field if e.where in ("", "address") else f"{field}: {e.where}"
            raise type(e)(e.problem, where=where, accepted=e.accepted, fix=e.fix) from None
        if address.digest:
            raise RecipeError(
                f"{text!r:.200} names a digest, which follows from the bundle",
                where=field,
                fix="Give a tag, or none for package.version.",
            )
        if address in parsed:
            raise RecipeError(f"{text!r:.200} comes twice", where=field, fix="Leave one out.")
        parsed.append(address)
    return parsed


def describe_tag(address: BundleAddress, version: str, open_place: OpenPlace) -> str:
    """Return a sentence for `optimize plan`: the digest that the tag of an address to publish to
    names now, or the error there."""
    tag = address.tag or version
    try:
        with open_place(str(address)) as (_, place):
            data = place.read_manifest(tag)
    except ExplainedError as e:
        return str(e)
    if data is None:
        return f"it answers; the tag {tag} is free"
    present = digest_of(data)[:19]
    return f"it answers; the tag {tag} names {present}..., and another bundle is refused"


def publish(
    addresses: Sequence[BundleAddress], bundle: Path, open_place: OpenPlace
) -> tuple[Published, ...]:
    """Publish the folder `bundle` and its attachments; return one result per address."""
    version = str(read_manifest(bundle)["version"])
    done = []
    for address in addresses:
        tag = address.tag or version
        at = replace(address, tag=tag)
        try:
            with open_place(str(address)) as (_, place):
                receipt = push(bundle, place, tag)
            done.append(Published(str(replace(at, digest=receipt.digest)), receipt))
        except ExplainedError as e:
            fix = f"The bundle is at {bundle}; to finish: optimize publish {bundle} {at}"
            done.append(Published(str(at), None, e, fix))
        say(f"publish: {done[-1].text}")
    note = {"version": version, "published": [p.as_dict() for p in done if p.receipt]}
    if addresses:
        with atomic.explain_disk_errors(bundle.parent, "--artifacts"):
            atomic.write(bundle.with_name(f"{bundle.name}{NOTE}"), json.dumps(note).encode())
    return tuple(done)
