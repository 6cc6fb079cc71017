"""Publish a bundle and its attachments to a registry, a layout, an object store or a hub.

A hub gets one revision (hubs/folders.py). The others get, in this order, the blobs, the manifest
under its digest, the attachments, and the tag. After a kill the tag names the old bundle or the
complete new one, and the next run sends the missing files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from optimizer.foundation.buckets.blob import Blob, digest_of
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.progress import bar
from optimizer.harness.bundle.manifest import read_manifest, read_reports
from optimizer.harness.errors import BundleError
from optimizer.harness.trust import verify
from optimizer.publish.attachments import (
    ATTACHMENTS,
    REPORT,
    SIGNATURE,
    Attachment,
    attachment_path,
    names_bundle,
)
from optimizer.publish.environments.history import SUFFIX
from optimizer.publish.hubs.folders import BundleFolder, Folders, attachment_name
from optimizer.publish.model_pack import Artifact, build_artifact, build_referrer
from optimizer.publish.registries.place import EMPTY, Json, Place, describe
from optimizer.publish.same_model import check_same_model


@dataclass(frozen=True)
class Receipt:
    """Result of publishing: bytes sent and bytes that the place had; suffixes of attachments."""

    tag: str
    digest: str
    sent: int
    shared: int
    attached: tuple[str, ...]


def push(
    bundle: Path,
    place: Place | Folders,
    tag: str,
    *,
    replace: bool = False,
    new_model: bool = False,
) -> Receipt:
    """Publish the folder `bundle` under the tag, and return the receipt.

    replace: move a tag that names another bundle.
    new_model: publish where only bundles of another model or task are.

    Raises BundleError for a folder that differs from its manifest and for an attachment of another
    bundle; RecipeError for a place that holds another model and for a tag that names another
    bundle; see Place for other errors.
    """
    manifest = read_manifest(bundle)
    _, differences = verify.list_problems(bundle)
    if differences:
        raise BundleError(
            f"not published, because it differs from its manifest: {differences[0]}",
            where=str(bundle),
        )
    attached = read_attachments(bundle)
    packed = build_artifact(bundle, manifest)
    digest = digest_of(packed.manifest)
    if not new_model:
        check_same_model(place, digest, manifest)
    before = _check_tag(place, tag, digest, replace)
    if isinstance(place, Folders):
        folder = BundleFolder(
            digest,
            manifest,
            read_reports(bundle, manifest),
            packed.files,
            {attachment_name(a, data): data for a, data in attached if a is not REPORT},
        )
        sent = place.publish(folder, tag, replace=replace)
        shared = folder.size - sent
    else:
        label = f"{manifest['name']}-{manifest['version']}"
        sent, shared = _write(place, packed, attached, label)
        if before != digest and not place.move({tag: packed.manifest}, tag, before):
            raise RecipeError(
                "another bundle was published under this tag meanwhile",
                where=f"tag {tag}",
                fix="See the bundle that it names now (optimize versions); run the command again.",
            )
    names = tuple(attachment.suffix for attachment, _ in attached)
    return Receipt(tag, digest, sent, shared, names)


def _write(
    place: Place, packed: Artifact, attached: list[tuple[Attachment, bytes]], label: str
) -> tuple[int, int]:
    """Write the blobs and manifests of a bundle to a registry, all but the tag; return the bytes
    sent, and the bytes that the registry had."""
    sent, shared = send(place, bar(packed.blobs, "publish"))
    place.write_manifest(packed.manifest)
    subject = describe(packed.manifest)
    for attachment, data in attached:
        blob = Blob.describe(data)
        more, same = send(place, (EMPTY, blob))
        sent, shared = sent + more, shared + same
        name = f"{label}{attachment.suffix}"
        manifest = build_referrer(blob, attachment.media_type, name, subject)
        place.write_referrer(manifest, subject["digest"])
    return sent, shared


def send(place: Place, blobs: Iterable[Blob]) -> tuple[int, int]:
    """Send a bundle's blobs that the registry `place` lacks; return the bytes sent, and the bytes
    it had."""
    sent = shared = 0
    for blob in blobs:
        if place.has(blob):
            shared += blob.size
        else:
            place.send(blob)
            sent += blob.size
    return sent, shared


def read_attachments(bundle: Path) -> list[tuple[Attachment, bytes]]:
    """Return (kind, bytes) of each attachment of the bundle to publish that exists, and of its
    report. Raises BundleError for an attachment of another bundle, e.g. from before a rebuild."""
    pairs = [(a, attachment_path(bundle, a)) for a in ATTACHMENTS]
    pairs.append((REPORT, bundle / "report.html"))
    attached = []
    for attachment, file in pairs:
        if not file.is_file():
            continue
        if file.stat().st_size > verify.LARGEST:
            raise BundleError(f"the file is above {verify.LARGEST:,} bytes", where=str(file))
        data = file.read_bytes()
        if not names_bundle(attachment, data, bundle):
            command = "sign" if attachment is SIGNATURE else "attest"
            raise BundleError(
                "the file belongs to another bundle than this folder",
                where=str(file),
                fix=f"Write it again (optimize {command} {bundle}), or remove it.",
            )
        attached.append((attachment, data))
    return attached


def _check_tag(place: Place | Folders, tag: str, digest: str, replace: bool) -> str:
    """Return the digest that the tag to publish under names, "" for a new tag. RecipeError if it
    may not move."""
    if tag.endswith(SUFFIX):
        raise RecipeError(
            f"tags that end in {SUFFIX} are reserved for the histories of environments",
            where=f"tag {tag}",
            fix="Give another tag.",
        )
    data = place.read_manifest(tag)
    before = "" if data is None else digest_of(data)
    if before not in ("", digest) and place.read_manifest(f"{tag}{SUFFIX}") is not None:
        raise RecipeError(
            "this tag is an environment; only `optimize promote` moves it",
            where=f"tag {tag}",
            fix="Publish the bundle under its version, then: optimize promote.",
        )
    if before not in ("", digest) and not replace:
        raise RecipeError(
            f"it names another bundle, {before[:19]}..., and this one is {digest[:19]}...",
            where=f"tag {tag}",
            fix="Give the bundle another package.version, or move the tag: --replace.",
        )
    return before


def build_document(receipt: Receipt, address: str) -> Json:
    """Return the document that `optimize publish --json` prints."""
    return {"exit_code": 0, "address": address, **vars(receipt), "attached": [*receipt.attached]}
