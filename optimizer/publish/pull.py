"""Fetch a bundle from a registry, a layout, an object store or a hub.

The tag is resolved once; everything else is fetched by digest and compared, so that a moved tag or
a swapped layer does no harm. Files arrive in a folder beside the final one, which appears complete,
verified and, with `key`, signed, or not at all. The next run resumes a killed one.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from optimizer.foundation import atomic
from optimizer.foundation.buckets.blob import digest_of
from optimizer.foundation.errors import RecipeError, suggest
from optimizer.foundation.progress import bar, say
from optimizer.harness.bundle.manifest import REPORT, read_manifest
from optimizer.harness.bundle.signed import check_age
from optimizer.harness.errors import BundleError
from optimizer.harness.trust import verify
from optimizer.publish.address import BundleAddress
from optimizer.publish.attachments import ATTACHMENTS, PROVENANCE, SBOM, SIGNATURE, attachment_path
from optimizer.publish.documents.signatures import find_attachments, find_signature
from optimizer.publish.model_pack import read_layers
from optimizer.publish.registries.place import Json, Releases, parse_document
from optimizer.publish.small_files import SWAPPED, fetch_small
from optimizer.store import digest_file


@dataclass(frozen=True)
class Pulled:
    """Result of fetching a bundle.

    digest, received: digest of the ModelPack manifest, and bytes fetched now.
    attached, key: suffixes of the attachments, and hint of the signing key or "".
    """

    folder: Path
    digest: str
    received: int
    attached: tuple[str, ...]
    key: str


def resolve(place: Releases, address: BundleAddress) -> bytes:
    """Find the bundle to pull: return the bytes of the ModelPack manifest at an address, by its
    digest, else by its tag.

    Raises RecipeError for a missing manifest or reference, BundleError for another digest.
    """
    reference = address.digest or address.tag
    if not reference:
        raise RecipeError(
            "the address has no tag",
            where=str(address),
            accepted=", ".join(place.tags()) or "none: nothing is published here yet",
            fix="Add :TAG to the address.",
        )
    data = place.read_manifest(reference)
    if data is None:
        tags = place.tags()
        raise RecipeError(
            f"nothing here has the tag or digest {reference}{suggest(reference, tags)}",
            where=str(address),
            accepted=", ".join(tags) or "none: nothing is published here yet",
        )
    if address.digest and digest_of(data) != address.digest:
        raise BundleError(f"it has {digest_of(data)}", where=str(address), fix=SWAPPED)
    return data


def pull(
    place: Releases,
    address: BundleAddress,
    into: Path | None,
    key: Path | None = None,
    at_least: str | None = None,
) -> Pulled:
    """Fetch the bundle at an address into a folder; a folder that is this bundle stays as it is.

    into: folder; None for artifacts/NAME/VERSION.
    key: public key whose signature is required.
    at_least: oldest accepted version.

    Raises RecipeError for a folder of something else; BundleError for bytes that differ from their
    digest, a missing signature and a version that is too old; see Releases for other errors.
    """
    data = resolve(place, address)
    digest, layers = digest_of(data), read_layers(data, str(address))
    if verify.MANIFEST not in layers:
        raise BundleError(f"not a bundle: it has no {verify.MANIFEST}", where=str(address))
    signed, hint = None, ""
    if key is not None:  # before any file is fetched
        signed, hint = find_signature(place, digest, layers, key, str(address))
    final = into or _default_folder(place, layers, address)
    with atomic.explain_disk_errors(final, "--to"):
        final.parent.mkdir(parents=True, exist_ok=True)
        with atomic.lock(final.parent / f".{final.name}.pull.lock"):
            present = _is_present(final, layers)
            work = final.parent / f".{final.name}.{digest[7:19]}.pull"
            folder = final if present else work / "bundle"
            received = 0 if present else _fetch(place, layers, folder)
            _, differences = verify.list_problems(folder)
            if differences:
                raise BundleError(differences[0], where=str(folder), fix=SWAPPED)
            read_manifest(folder)
            kinds = ATTACHMENTS if key is None else (SBOM, PROVENANCE)
            attached = find_attachments(place, digest, layers, folder, kinds)
            if signed is not None:
                attached[SIGNATURE] = signed
            if at_least is not None:
                check_age(read_manifest(folder)["version"], at_least, str(address))
            for attachment, content in attached.items():
                work.mkdir(parents=True, exist_ok=True)
                atomic.write(attachment_path(final, attachment), content, work / "attachment")
            if present:
                say(f"pull: {final} holds this bundle already")
            else:
                atomic.finish(folder, final)
            atomic.remove(work)
    names = tuple(a.suffix for a in ATTACHMENTS if a in attached)
    return Pulled(final, digest, received, names, hint)


def _default_folder(place: Releases, layers: dict[str, Json], address: BundleAddress) -> Path:
    """Choose the folder to pull a bundle into: artifacts/NAME/VERSION, with name and version from
    the bundle's manifest.json."""
    layer = layers[verify.MANIFEST]
    manifest = parse_document(fetch_small(place, layer, str(address)), str(address))
    name, version = str(manifest.get("name")), str(manifest.get("version"))
    for part in (name, version):
        if verify.name_problem(part) or "/" in part or part.startswith("."):
            raise BundleError(f"{part!r:.80} is not valid as a folder's name", where=str(address))
    return Path("artifacts") / name / version


def pull_description(place: Releases, address: BundleAddress, folder: Path) -> None:
    """Fetch of a published bundle only manifest.json and report.json into `folder`, each compared
    with its digest."""
    layers = read_layers(resolve(place, address), str(address))
    for name in (verify.MANIFEST, REPORT):
        if name in layers:
            (folder / name).write_bytes(fetch_small(place, layers[name], str(address)))


def _is_present(final: Path, layers: dict[str, Json]) -> bool:
    """Return True for a folder that holds the bundle to pull already. Raises RecipeError for
    another folder."""
    if not os.path.lexists(final):
        return False
    if final.is_dir() and not final.is_symlink() and not _has_other_files(final, layers):
        return True
    raise RecipeError(
        "another file or folder has this path, and it is not replaced",
        where=str(final),
        fix="Move it away, or give another folder: --to FOLDER.",
    )


def _has_other_files(folder: Path, layers: dict[str, Json]) -> bool:
    names = {name for name, _ in verify.list_entries(folder)}
    return names != set(layers) or any(
        verify.describe_problem(
            folder, name, {"sha256": layer["digest"][7:], "size": layer["size"]}
        )
        for name, layer in layers.items()
    )


def _fetch(place: Releases, layers: dict[str, Json], folder: Path) -> int:
    """Fetch every file of a published bundle into the folder, equal files once; return the bytes
    received now."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, _ in [*verify.list_entries(folder)]:
        if name not in layers:
            (folder / name).unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()  # left by a killed run
    received = 0
    first: dict[str, Path] = {}
    for name, layer in bar(layers.items(), "pull", len(layers)):
        path, digest, size = folder / name, layer["digest"], layer["size"]
        path.parent.mkdir(parents=True, exist_ok=True)
        if digest in first:
            shutil.copyfile(first[digest], path)
            continue
        before = path.stat().st_size if path.is_file() else 0
        if before > size:
            path.unlink()
            before = 0
        place.receive(digest, size, path)
        received += size - before
        if f"sha256:{digest_file(path)}" != digest:
            path.unlink()
            raise BundleError(f"the layer of {name} has other bytes", where=digest, fix=SWAPPED)
        first[digest] = path
    return received
