"""Find the signature and the documents of a published bundle among its attachments.

Everybody who may push may attach any number of files. The search therefore skips attachments that
are too large or cannot be parsed, fetches equal bytes once, and ends after MOST attachments or
BUDGET bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from optimizer.foundation.progress import say
from optimizer.harness.errors import BundleError
from optimizer.harness.trust import signature, verify
from optimizer.publish.attachments import ATTACHMENTS, SIGNATURE, Attachment, names_bundle
from optimizer.publish.model_pack import is_descriptor, read_layers
from optimizer.publish.registries.place import Json, Releases
from optimizer.publish.small_files import fetch_small

MOST = 10_000
REPORT_FILE = "report.html"
BUDGET = 512 << 20  # bytes of manifests and attachments
MOST_WITHOUT_KEY = 100  # attachments fetched per kind if no key is required
LARGEST_REFERRER = 16 << 10  # bytes of an attachment's manifest; ours have 900
PER_FILE = 512  # bytes of a signature per file, besides the file's name
ENVELOPE = 16 << 10  # bytes of a signature of no files
ANNOUNCE_AFTER = 100  # attachments after which the search prints a line


def find_signature(
    place: Releases, digest: str, layers: Mapping[str, Json], key: Path, where: str
) -> tuple[bytes, str]:
    """Find in a registry the key's signature of exactly the files in `layers`, and the key's hint.

    layers: {file name: descriptor} of the bundle with this digest.

    Raises BundleError if there is none; see `signature.load_public` for the key.
    """
    public_key = signature.load_public(key)
    files = {name: layer["digest"].removeprefix("sha256:") for name, layer in layers.items()}
    problem = _report_unsigned(place, digest, layers, where)
    for content in fetch_attachments(place, digest, SIGNATURE, _largest(SIGNATURE, layers), MOST):
        try:
            if signature.verify_signed_files(content, public_key, where) == files:
                return content, signature.digest_key(public_key)
            problem = BundleError("this key signed other files than these", where=where)
        except BundleError as e:
            problem = e
    raise problem


def _report_unsigned(
    place: Releases, digest: str, layers: Mapping[str, Json], where: str
) -> BundleError:
    """Return the error for a bundle without a signature. To a registry or a layout `publish`
    attaches report.html, so a bundle there with nothing attached is a copy that lost it."""
    sign = "its publisher signs it (optimize sign) and publishes it again."
    registry, layout = where.partition("oci://")[2], where.partition("oci-layout:")[2]
    if REPORT_FILE not in layers or not (registry or layout) or place.referrers(digest):
        problem = "no signature is attached to the bundle here, and one is required"
        return BundleError(problem, where=where, fix=f"If it was never signed, {sign}")
    to = registry.partition("@")[0] or f"--to-oci-layout {layout.partition('@')[0]}"
    return BundleError(
        "nothing is attached to the bundle here, neither a signature nor the report that publish "
        "attaches: this is a copy that lost them, as `skopeo copy` makes",
        where=where,
        fix=f"Copy it with its referrers: oras cp -r ORIGINAL {to}; or pull from the address that "
        f"it was published to. If it was never signed, {sign}",
    )


def find_attachments(
    place: Releases,
    digest: str,
    layers: Mapping[str, Json],
    folder: Path,
    kinds: Sequence[Attachment] = ATTACHMENTS,
) -> dict[Attachment, bytes]:
    """Find in a registry the last attachment of each kind that names this bundle. Authors are not
    verified.

    folder: folder of the bundle, already compared with `layers`.
    """
    matching = {}
    for attachment in kinds:
        largest = _largest(attachment, layers)
        for content in fetch_attachments(place, digest, attachment, largest, MOST_WITHOUT_KEY):
            if names_bundle(attachment, content, folder):
                matching[attachment] = content
                break
    return matching


def fetch_attachments(
    place: Releases, digest: str, attachment: Attachment, largest: int, most: int
) -> Iterator[bytes]:
    """Yield from a registry a bundle's attachments of one kind as bytes, the last one first, none
    twice.

    largest: maximum bytes per attachment.
    most: maximum number of attachments to look at.
    """
    listed = [
        entry
        for entry in place.referrers(digest)
        # `skopeo copy` of an index drops the types; `_layers` reads that of the manifest
        if entry.get("artifactType") in (None, attachment.media_type)
        and is_descriptor(entry)
        and entry["size"] <= LARGEST_REFERRER
    ]
    seen: set[str] = set()
    left = BUDGET
    for number, entry in enumerate(reversed(listed)):
        if number == ANNOUNCE_AFTER < most:
            say(f"{len(listed):,} {attachment.suffix} files are attached; trying each of them")
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
            content = fetch_small(place, layers[0], entry["digest"])
        except BundleError:
            continue
        yield content


def _largest(attachment: Attachment, layers: Mapping[str, Json]) -> int:
    """Return the maximum bytes of one attachment to fetch from a registry; a signature only names
    the bundle's files."""
    if attachment is not SIGNATURE:
        return verify.LARGEST
    names = sum(2 * len(name.encode()) + PER_FILE for name in layers)
    return min(ENVELOPE + names, verify.LARGEST)


def _layers(data: bytes, attachment: Attachment) -> list[Json]:
    return [*read_layers(data, attachment.suffix, attachment.media_type).values()]
