"""Fetch a bundle from a registry or a layout.

A tag is resolved once, to a manifest whose digest is computed here; everything after is fetched by
digest and compared, so that a tag that moves meanwhile, or a layer that was swapped, changes
nothing. Files are fetched into a folder beside the final one, which appears complete, verified and
signed by the required key, or not at all; a run that was killed leaves what it had to the next one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from optimizer.foundation import atomic
from optimizer.foundation.errors import RecipeError, closest
from optimizer.foundation.progress import bar, say
from optimizer.harness.bundle.manifest import REPORT, read_manifest
from optimizer.harness.bundle.signed import check_age
from optimizer.harness.errors import BundleError
from optimizer.harness.trust import verify
from optimizer.publish.address import Address
from optimizer.publish.attachments import ATTACHMENTS, PROVENANCE, SBOM, SIGNATURE, beside
from optimizer.publish.documents.signatures import attachments, find_signature
from optimizer.publish.model_pack import layers_of
from optimizer.publish.registries.place import Json, Releases, digest_of, document
from optimizer.publish.small import SWAPPED, small


@dataclass(frozen=True)
class Pulled:
    """The folder; the digest of the manifest it was fetched by; bytes fetched; the attachments;
    the hint of the key that signed it, or ""."""

    folder: Path
    digest: str
    received: int
    attached: tuple[str, ...]
    key: str


def resolve(place: Releases, address: Address) -> bytes:
    """The manifest that the address names: by its digest if it has one, else by its tag.

    Raises RecipeError where there is none.
    """
    reference = address.digest or address.tag
    if not reference:
        raise RecipeError(
            "which version?",
            where=str(address),
            accepted=", ".join(place.tags()) or "there is none yet",
            fix="Add :TAG to the address.",
        )
    data = place.read_manifest(reference)
    if data is None:
        tags = place.tags()
        raise RecipeError(
            f"nothing has this name{closest(reference, tags)}",
            where=str(address),
            accepted=", ".join(tags) or "there is none yet",
        )
    if address.digest and digest_of(data) != address.digest:
        raise BundleError(f"it has {digest_of(data)}", where=str(address), fix=SWAPPED)
    return data


def pull(
    place: Releases,
    address: Address,
    into: Path | None,
    key: Path | None = None,
    at_least: str | None = None,
) -> Pulled:
    """Fetch what the address names into the folder `into`, by default artifacts/NAME/VERSION.

    key: the public key that must have signed it. at_least: the oldest version that will do. A
    folder that is this bundle already stays as it is. Raises RecipeError where something else has
    the folder's name; BundleError for what is not what its digest says, not signed by the key or
    too old; see Releases for the others.
    """
    data = resolve(place, address)
    digest, layers = digest_of(data), layers_of(data, str(address))
    if verify.MANIFEST not in layers:
        raise BundleError(f"no bundle: it has no {verify.MANIFEST}", where=str(address))
    final = into or _default(place, layers, address)
    with atomic.disk_errors_explained(final, "--to"):
        final.parent.mkdir(parents=True, exist_ok=True)
        with atomic.lock(final.parent / f".{final.name}.pull.lock"):
            present = _is_this(final, layers)
            work = final.parent / f".{final.name}.{digest[7:19]}.pull"
            folder = final if present else work / "bundle"
            received = 0 if present else _fetch(place, layers, folder)
            _, differences = verify.problems(folder)
            if differences:
                raise BundleError(differences[0], where=str(folder), fix=SWAPPED)
            read_manifest(folder)
            kinds = ATTACHMENTS if key is None else (SBOM, PROVENANCE)
            attached, hint = attachments(place, digest, layers, folder, kinds), ""
            if key is not None:
                attached[SIGNATURE], hint = find_signature(place, digest, layers, key, str(address))
            if at_least is not None:
                check_age(read_manifest(folder)["version"], at_least, str(address))
            for attachment, content in attached.items():
                work.mkdir(parents=True, exist_ok=True)
                atomic.write(beside(final, attachment), content, work / "attachment")
            if present:
                say(f"pull: {final} is this bundle already")
            else:
                atomic.finish(folder, final)
            atomic.remove(work)
    names = tuple(a.suffix for a in ATTACHMENTS if a in attached)
    return Pulled(final, digest, received, names, hint)


def _default(place: Releases, layers: dict[str, Json], address: Address) -> Path:
    """artifacts/NAME/VERSION, from the manifest of the bundle itself."""
    layer = layers[verify.MANIFEST]
    manifest = document(small(place, layer, str(address)), str(address))
    name, version = str(manifest.get("name")), str(manifest.get("version"))
    for part in (name, version):
        if verify.name_problem(part) or "/" in part or part.startswith("."):
            raise BundleError(f"{part!r:.80} is not a name of a folder", where=str(address))
    return Path("artifacts") / name / version


def pull_description(place: Releases, address: Address, folder: Path) -> None:
    """Fetch of a bundle only its manifest.json and report.json, each compared with its digest."""
    layers = layers_of(resolve(place, address), str(address))
    for name in (verify.MANIFEST, REPORT):
        if name in layers:
            (folder / name).write_bytes(small(place, layers[name], str(address)))


def _is_this(final: Path, layers: dict[str, Json]) -> bool:
    """Return True for a folder that is the bundle to be fetched. Raises RecipeError for a folder
    of something else, which is not replaced."""
    if not os.path.lexists(final):
        return False
    if final.is_dir() and not final.is_symlink() and not _differs(final, layers):
        return True
    raise RecipeError(
        "something else is here, and it is not replaced",
        where=str(final),
        fix="Move it away, or give another folder: --to FOLDER.",
    )


def _differs(folder: Path, layers: dict[str, Json]) -> bool:
    names = {name for name, _ in verify.entries(folder)}
    return names != set(layers) or any(
        verify.problem(folder, name, {"sha256": layer["digest"][7:], "size": layer["size"]})
        for name, layer in layers.items()
    )


def _fetch(place: Releases, layers: dict[str, Json], folder: Path) -> int:
    """Fetch every file into the folder, each digest once; returns the bytes that came now."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, _ in [*verify.entries(folder)]:
        if name not in layers:
            (folder / name).unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()  # of a run that was killed
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
        if _digest(path) != digest:
            path.unlink()
            raise BundleError(f"the layer of {name} has other bytes", where=digest, fix=SWAPPED)
        first[digest] = path
    return received


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return f"sha256:{hashlib.file_digest(f, 'sha256').hexdigest()}"
