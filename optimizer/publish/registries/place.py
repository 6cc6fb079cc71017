"""Interface of registries and layouts: blobs by digest, manifests by digest and by tag."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from optimizer.harness.errors import BundleError
from optimizer.harness.trust.verify import parse

Json = dict[str, Any]
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
LARGEST_MANIFEST = 4 << 20  # bytes; the specification has a registry take no less


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True)
class Blob:
    """Bytes with their digest, "sha256:...": in a file, or here."""

    digest: str
    size: int
    content: Path | bytes

    @classmethod
    def of(cls, data: bytes) -> Blob:
        return cls(digest_of(data), len(data), data)

    def read(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


EMPTY = Blob.of(b"{}")
"""The config of what needs none."""


class Releases(Protocol):
    """A place as pull, promote and rollback use it. Every effect is idempotent.

    Errors: MachineError where the place does not answer or is full, BundleError where its content
    is not as declared.
    """

    def send(self, blob: Blob) -> None:
        """Put a blob there."""

    def receive(self, digest: str, size: int, into: Path) -> None:
        """Append what is missing of a blob to the file `into`; who calls compares the digest."""

    def read_manifest(self, reference: str) -> bytes | None:
        """By tag or digest; None where there is none."""

    def referrers(self, subject: str) -> list[Json]:
        """Descriptors of the manifests that have this subject, in the order they were written."""

    def tags(self) -> list[str]:
        """All tags but those that stand for referrers."""

    def move(self, tags: Mapping[str, bytes], last: str, expected: str) -> bool:
        """Write manifests under tags, in their order, if the tag `last` names the digest
        `expected`, "" for nothing. False, and nothing is written, where it names another."""

    def close(self) -> None:
        """Let go of connections."""


class Place(Releases, Protocol):
    """Blobs and manifests, written one by one. What holds whole folders instead:
    publish/hubs/folders.py."""

    def has(self, blob: Blob) -> bool:
        """Return True for a blob that is there, complete."""

    def write_manifest(self, data: bytes, tag: str = "") -> None:
        """Under its digest, and under the tag if one is given."""

    def write_referrer(self, data: bytes, subject: str) -> None:
        """A manifest whose subject is the manifest with the digest `subject`."""


def canonical(document: Json) -> bytes:
    """The bytes of a manifest: the same document gives the same digest."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def document(data: bytes, where: str) -> Json:
    """A manifest's JSON. Raises BundleError."""
    try:
        value = parse(data)
    except (ValueError, RecursionError) as e:
        raise BundleError(f"no JSON ({e})", where=where) from None
    if not isinstance(value, dict):
        raise BundleError("no JSON object", where=where)
    return value


def descriptor(data: bytes) -> Json:
    """Return the entry of a manifest in an index."""
    manifest = document(data, "manifest")
    entry: Json = {
        "mediaType": manifest["mediaType"],
        "digest": digest_of(data),
        "size": len(data),
    }
    for key in ("artifactType", "annotations"):
        if key in manifest:
            entry[key] = manifest[key]
    return entry


def fallback_tag(subject: str) -> str:
    """The tag of the index of referrers, where a registry has no API for them."""
    return subject.replace(":", "-")


def is_fallback(tag: str) -> bool:
    return tag.startswith("sha256-") and len(tag) == len("sha256-") + 64


def index_with(old: bytes | None, added: Json) -> bytes:
    """The index of referrers with one more, or as it was when it has it."""
    listed = listed_in(old)
    if all(entry["digest"] != added["digest"] for entry in listed):
        listed = [*listed, added]
    return canonical({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": listed})


def listed_in(index: bytes | None) -> list[Json]:
    """The descriptors in an index of referrers. Raises BundleError."""
    if index is None:
        return []
    listed = document(index, "index of referrers").get("manifests")
    if not isinstance(listed, list) or not all(
        isinstance(e, dict) and isinstance(e.get("digest"), str) for e in listed
    ):
        raise BundleError("no list of manifests", where="index of referrers")
    return listed
