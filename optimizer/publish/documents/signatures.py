"""Search the attachments of a published bundle for the right one.

Everybody who may push may attach any number of files, so their order and number mean nothing. An
attachment whose size cannot be right is not fetched, equal bytes are fetched once, and an
attachment that cannot be parsed is skipped. The search ends after MOST attachments or BUDGET bytes,
which an attacker must have uploaded first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from optimizer.foundation.progress import say
from optimizer.harness.errors import BundleError
from optimizer.harness.trust import signature, verify
from optimizer.publish.attachments import ATTACHMENTS, SIGNATURE, Attachment, belongs
from optimizer.publish.model_pack import layers_of, well_described
from optimizer.publish.registries.place import Json, Releases
from optimizer.publish.small import small

MOST = 10_000
BUDGET = 512 << 20  # bytes of manifests and attachments
MOST_UNNAMED = 100
"""Attachments that are fetched at most where no key is required."""
LARGEST_REFERRER = 16 << 10  # bytes of the manifest of one attachment; ours have 900
PER_FILE = 512  # bytes of a signature for each file, besides the file's name
ENVELOPE = 16 << 10  # bytes of a signature of no files
TOLD = 100  # attachments after which a search is announced


def find_signature(
    place: Releases, digest: str, layers: Mapping[str, Json], key: Path, where: str
) -> tuple[bytes, str]:
    """The signature by the key of the very files that the layers are, and the key's hint.

    layers: {name: descriptor} of the bundle with this digest. Raises BundleError where there is
    none; as `signature.load_public` for the key.
    """
    public_key = signature.load_public(key)
    files = {name: layer["digest"].removeprefix("sha256:") for name, layer in layers.items()}
    problem = BundleError(
        "it has no signature, and one is required",
        where=where,
        fix="Have whoever published it sign it: optimize sign, then publish again.",
    )
    for content in contents(place, digest, SIGNATURE, _largest(SIGNATURE, layers), MOST):
        try:
            if signature.signed_files(content, public_key, where) == files:
                return content, signature.hint(public_key)
            problem = BundleError("the signature of this key is of other files", where=where)
        except BundleError as e:
            problem = e
    raise problem


def attachments(
    place: Releases,
    digest: str,
    layers: Mapping[str, Json],
    folder: Path,
    kinds: Sequence[Attachment] = ATTACHMENTS,
) -> dict[Attachment, bytes]:
    """The last attachment of each kind that names this bundle. Its author is not verified.

    folder: the bundle, already compared with its layers.
    """
    chosen = {}
    for attachment in kinds:
        each = contents(place, digest, attachment, _largest(attachment, layers), MOST_UNNAMED)
        content = next((c for c in each if belongs(attachment, c, folder)), None)
        if content is not None:
            chosen[attachment] = content
    return chosen


def contents(
    place: Releases, digest: str, attachment: Attachment, largest: int, most: int
) -> Iterator[bytes]:
    """The bytes of the attachments of one kind, the last one first, none twice.

    largest: maximum bytes of one. most: maximum number that is fetched.
    """
    listed = [
        entry
        for entry in place.referrers(digest)
        if entry.get("artifactType") == attachment.media_type
        and well_described(entry)
        and entry["size"] <= LARGEST_REFERRER
    ]
    seen: set[str] = set()
    left = BUDGET
    for number, entry in enumerate(reversed(listed)):
        if number == TOLD < most:
            say(f"{len(listed):,} {attachment.suffix} are attached; looking for the right one")
        if number == most or left <= 0:
            return
        if entry["digest"] in seen:
            continue
        seen.add(entry["digest"])
        try:
            data = place.read_manifest(entry["digest"])
            left -= len(data or b"")
            layers = [] if data is None else _layers(data, attachment)
            if len(layers) != 1 or layers[0]["size"] > largest or layers[0]["digest"] in seen:
                continue
            seen.add(layers[0]["digest"])
            left -= layers[0]["size"]
            content = small(place, layers[0], entry["digest"])
        except BundleError:
            continue
        yield content


def _largest(attachment: Attachment, layers: Mapping[str, Json]) -> int:
    """The bytes that one can have: a signature names the files of its bundle, and no others."""
    if attachment is not SIGNATURE:
        return verify.LARGEST
    names = sum(2 * len(name.encode()) + PER_FILE for name in layers)
    return min(ENVELOPE + names, verify.LARGEST)


def _layers(data: bytes, attachment: Attachment) -> list[Json]:
    return [*layers_of(data, attachment.suffix, attachment.media_type).values()]
