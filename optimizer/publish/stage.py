"""The last stage: a bundle whose gates passed goes where the recipe says.

It is the one stage with effects outside this machine, and is never taken for done without asking
there: a rerun compares the content of each place, and sends the missing files. Where one place
fails, the others are served. VERSION.published.json beside the bundle lists the published
addresses, for people and tools; nothing here reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer.foundation import atomic
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.progress import say
from optimizer.harness.bundle.manifest import read_manifest
from optimizer.harness.errors import ExplainedError
from optimizer.publish.address import Address, parse
from optimizer.publish.hubs.folders import Folders
from optimizer.publish.push import Receipt, push
from optimizer.publish.registries.layout import Layout
from optimizer.publish.registries.place import Json, Place, digest_of
from optimizer.publish.registries.places import check_installed

Opened = Callable[[str], AbstractContextManager[tuple[Address, Place | Folders]]]
"""Opens the place at an address for as long as it is used."""
NOTE = ".published.json"


@dataclass(frozen=True)
class Published:
    """address: as the recipe has it, or with tag and digest once it is published. error: why it is
    not, and fix how it will be."""

    address: str
    receipt: Receipt | None = None
    error: ExplainedError | None = None
    fix: str = ""

    def as_dict(self) -> Json:
        if self.receipt is not None:
            return {
                "address": self.address,
                **vars(self.receipt),
                "attached": [*self.receipt.attached],
            }
        parts = self.error.as_dict() if self.error else {}
        code = self.error.exit_code if self.error else 0
        fix = f"{parts.get('fix', '')} {self.fix}".strip()
        return {"address": self.address, "exit_code": code, **parts, "fix": fix}

    @property
    def text(self) -> str:
        if self.error is None:
            return f"published: {self.address}"
        return f"not published: {self.error} {self.fix}"


def check(addresses: Sequence[str]) -> list[Address]:
    """The recipe's list, as far as it can be known without asking anybody.

    Raises RecipeError for text that is not an address, has a digest, comes twice, or is a folder of
    something else; MachineError where a package is missing.
    """
    parsed: list[Address] = []
    for i, text in enumerate(addresses):
        at = f"publish.{i}"
        try:
            address = parse(text)
            if address.folder is not None:
                Layout(address.folder)
            check_installed(address)
        except ExplainedError as e:
            where = at if e.where in ("", "address") else f"{at}: {e.where}"
            raise type(e)(e.problem, where=where, accepted=e.accepted, fix=e.fix) from None
        if address.digest:
            raise RecipeError(
                f"{text!r:.200} names a digest, which follows from the bundle",
                where=at,
                fix="Give a tag, or none: it is then package.version.",
            )
        if address in parsed:
            raise RecipeError(f"{text!r:.200} comes twice", where=at, fix="Leave one out.")
        parsed.append(address)
    return parsed


def state(address: Address, version: str, opened: Opened) -> str:
    """Describe, for `optimize plan`, the content of the tag that the bundle would get, or the
    reason why it cannot be read."""
    tag = address.tag or version
    try:
        with opened(str(address)) as (_, place):
            data = place.read_manifest(tag)
    except ExplainedError as e:
        return str(e)
    if data is None:
        return f"it answers; nothing is tagged {tag} yet"
    return (
        f"it answers; the tag {tag} names {digest_of(data)[:19]}..., and another bundle is refused"
    )


def publish(addresses: Sequence[Address], bundle: Path, opened: Opened) -> tuple[Published, ...]:
    """Publish the folder `bundle` and its attachments to each address."""
    version = str(read_manifest(bundle)["version"])
    done = []
    for address in addresses:
        tag = address.tag or version
        at = replace(address, tag=tag)
        try:
            with opened(str(address)) as (_, place):
                receipt = push(bundle, place, tag)
            done.append(Published(str(replace(at, digest=receipt.digest)), receipt))
        except ExplainedError as e:
            fix = f"The bundle is at {bundle}; this finishes it: optimize publish {bundle} {at}"
            done.append(Published(str(at), None, e, fix))
        say(f"publish: {done[-1].text}")
    note = {"version": version, "published": [p.as_dict() for p in done if p.receipt]}
    if addresses:
        with atomic.disk_errors_explained(bundle.parent, "--artifacts"):
            atomic.write(bundle.with_name(f"{bundle.name}{NOTE}"), json.dumps(note).encode())
    return tuple(done)
