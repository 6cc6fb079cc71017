"""Interfaces of registries and layouts: blobs by digest, manifests by digest and by tag."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from optimizer.foundation.buckets.blob import Blob, digest_of
from optimizer.harness.errors import BundleError
from optimizer.harness.trust.verify import parse

Json = dict[str, Any]
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
LARGEST_MANIFEST = 4 << 20  # bytes; the OCI specification asks registries to accept this size


EMPTY = Blob.describe(b"{}")
"""Config of a manifest that needs none."""


class Releases(Protocol):
    """Interface that pull, promote and rollback need. Every method is idempotent.

    Errors: MachineError for a place that does not answer or is full, BundleError for content that
    is not as declared.
    """

    def send(self, blob: Blob) -> None:
        """Store a blob of a bundle in the registry."""

    def receive(self, digest: str, size: int, into: Path) -> None:
        """Append the missing bytes of a blob to the file `into`; the caller checks the digest."""

    def read_manifest(self, reference: str) -> bytes | None:
        """Return the bytes of the manifest with this tag or digest; None if it is missing."""

    def referrers(self, subject: str) -> list[Json]:
        """Return the descriptors of the manifests with this subject, in order of writing."""

    def tags(self) -> list[str]:
        """Return all tags except fallback tags, which name indexes of referrers."""

    def move(self, tags: Mapping[str, bytes], last: str, expected: str) -> bool:
        """Write {tag: manifest} in order, if the tag `last` names the digest `expected` ("" for a
        new tag); else write nothing and return False."""

    def close(self) -> None:
        """Close the connections to the registry."""


class Place(Releases, Protocol):
    """Releases with blobs and manifests that are written one by one, unlike hubs/folders.py."""

    def has(self, blob: Blob) -> bool:
        """Return True for a blob that the registry holds completely."""

    def write_manifest(self, data: bytes, tag: str = "") -> None:
        """Write a manifest under its digest, and under the tag unless it is ""."""

    def write_referrer(self, data: bytes, subject: str) -> None:
        """Write `data`, an OCI manifest (of a signature, say) that refers to the manifest with the
        digest `subject`."""


def encode(document: Json) -> bytes:
    """Encode a manifest of a registry as canonical JSON: the same document gives the same bytes."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def parse_document(data: bytes, where: str) -> Json:
    """Parse the bytes of a registry's manifest. Raises BundleError for bytes that are not a JSON
    object."""
    try:
        value = parse(data)
    except (ValueError, RecursionError) as e:
        raise BundleError(f"not JSON ({e})", where=where) from None
    if not isinstance(value, dict):
        raise BundleError("not a JSON object", where=where)
    return value


def describe(data: bytes) -> Json:
    """Return the descriptor of a published manifest: its digest, size and type, as an index lists
    it."""
    manifest = parse_document(data, "manifest")
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
    """Return the tag of the index of referrers in a registry without a referrers API."""
    return subject.replace(":", "-")


def is_fallback_tag(tag: str) -> bool:
    """Return True for a tag made by `fallback_tag`, which names no bundle of the registry."""
    return tag.startswith("sha256-") and len(tag) == len("sha256-") + 64


def add_referrer(old: bytes | None, added: Json) -> bytes:
    """Return the bytes of a registry's index of referrers `old` (None: empty) with descriptor
    `added`."""
    listed = parse_referrers(old)
    if all(entry["digest"] != added["digest"] for entry in listed):
        listed = [*listed, added]
    return encode({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": listed})


def parse_referrers(index: bytes | None) -> list[Json]:
    """Return the descriptors in a registry's index of referrers, [] for None; BundleError if
    invalid."""
    if index is None:
        return []
    listed = parse_document(index, "index of referrers").get("manifests")
    if not isinstance(listed, list) or not all(
        isinstance(e, dict) and isinstance(e.get("digest"), str) for e in listed
    ):
        raise BundleError('"manifests" is not a list of descriptors', where="index of referrers")
    return listed
