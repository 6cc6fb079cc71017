"""A folder as the OCI image layout has it: for sites without a network, and for other tools.

    oci-layout                    {"imageLayoutVersion": "1.0.0"}
    index.json                    a descriptor per tag, in org.opencontainers.image.ref.name
    blobs/sha256/<hex>            everything else

Blobs and the index appear under their names whole or not at all. Who writes has a lock, so that
two writers at once lose nothing. Referrers are listed in an index under the tag
sha256-<hex>, as in a registry without an API for them, so that other tools copy them by that tag.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from optimizer.foundation import atomic
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.harness.errors import BundleError
from optimizer.publish.registries import index as indexes
from optimizer.publish.registries.objects import LARGEST_READ, too_large
from optimizer.publish.registries.place import (
    LARGEST_MANIFEST,
    Blob,
    Json,
    descriptor,
    digest_of,
    document,
    fallback_tag,
    index_with,
    is_fallback,
    listed_in,
)


class Layout:
    """A Place. The folder is made when something is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        begun = {"blobs", ".lock", ".partial"}  # by a run that was killed at its start
        if not (folder / indexes.MARK).is_file() and {*_names(folder)} - begun:
            raise RecipeError(
                "the folder is not an OCI layout: it has no file oci-layout",
                where=str(folder),
                accepted="a layout, an empty folder, or none yet",
            )

    def has(self, blob: Blob) -> bool:
        return self.blob(blob.digest).is_file()

    def send(self, blob: Blob) -> None:
        with self.locked():
            self._send(blob)

    def _send(self, blob: Blob) -> None:
        """With the lock, so that nobody else writes the partial file."""
        final = self.blob(blob.digest)
        partial = self.folder / ".partial"
        if isinstance(blob.content, bytes):
            partial.write_bytes(blob.content)
        else:
            shutil.copyfile(blob.content, partial)
        with partial.open("rb") as f:
            if f"sha256:{hashlib.file_digest(f, 'sha256').hexdigest()}" != blob.digest:
                raise BundleError(
                    "it changed while it was published", where=f"{blob.content!s:.200}"
                )
        atomic.sync(partial)
        os.replace(partial, final)
        atomic.sync(final.parent)

    def receive(self, digest: str, size: int, into: Path) -> None:
        path = self.blob(digest)
        if not path.is_file() or path.stat().st_size != size:
            raise BundleError(
                f"the layout has no blob {digest} of {size:,} bytes", where=str(self.folder)
            )
        with path.open("rb") as source, into.open("ab") as target:
            source.seek(target.tell())
            shutil.copyfileobj(source, target, 1 << 20)

    def read_manifest(self, reference: str) -> bytes | None:
        digest = reference if reference.startswith("sha256:") else self.tagged().get(reference)
        if digest is None or not self.blob(digest).is_file():
            return None
        if self.blob(digest).stat().st_size > LARGEST_MANIFEST:
            raise BundleError("a manifest above 4 MiB", where=str(self.blob(digest)))
        data = self.blob(digest).read_bytes()
        if digest_of(data) != digest:
            raise BundleError("its digest is not its name", where=str(self.blob(digest)))
        return data

    def write_manifest(self, data: bytes, tag: str = "") -> None:
        with self.locked():
            self._check_blobs(data)
            self._send(Blob.of(data))
            if tag:
                self._set_tags({tag: data})

    def _check_blobs(self, data: bytes) -> None:
        """A prune at the same time may have taken a blob that was found here."""
        missing = [
            d for d in indexes.named_blobs(document(data, "manifest")) if not self.blob(d).is_file()
        ]
        if missing:
            raise MachineError(
                f"{missing[0]} was removed meanwhile",
                where=str(self.folder),
                fix="Run the same command again.",
            )

    def write_referrer(self, data: bytes, subject: str) -> None:
        tag = fallback_tag(subject)
        with self.locked():
            self._check_blobs(data)
            self._send(Blob.of(data))
            index = index_with(self.read_manifest(tag), descriptor(data))
            self._send(Blob.of(index))
            self._set_tags({tag: index})

    def referrers(self, subject: str) -> list[Json]:
        return listed_in(self.read_manifest(fallback_tag(subject)))

    def tags(self) -> list[str]:
        return sorted(tag for tag in self.tagged() if not is_fallback(tag))

    def move(self, tags: Mapping[str, bytes], last: str, expected: str) -> bool:
        """In one step: whoever reads the index sees all of it or nothing."""
        with self.locked():
            if self.tagged().get(last, "") != expected:
                return False
            for data in tags.values():
                self._check_blobs(data)
                self._send(Blob.of(data))
            self._set_tags(tags)
            return True

    def drop_tags(self, tags: Collection[str]) -> None:
        """The caller holds the lock."""
        self._write_index(indexes.without_tags(self._index(), tags))

    def blobs(self) -> dict[str, int]:
        folder = self.folder / "blobs" / "sha256"
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        return {f"sha256:{path.name}": path.stat().st_size for path in paths}

    def drop_blobs(self, digests: Collection[str]) -> None:
        """The caller holds the lock."""
        for digest in digests:
            self.blob(digest).unlink()

    def close(self) -> None:
        """Nothing is kept open."""

    def _set_tags(self, tags: Mapping[str, bytes]) -> None:
        self._write_index(indexes.with_tags(self._index(), tags))

    def _write_index(self, data: bytes) -> None:
        atomic.write(self.folder / indexes.FILE, data, self.folder / ".partial")

    def tagged(self) -> dict[str, str]:
        return indexes.tagged(self._index())

    def _index(self) -> Json:
        path = self.folder / indexes.FILE
        if path.is_file() and (size := path.stat().st_size) > LARGEST_READ:
            raise too_large(size, str(path))
        return indexes.read(path.read_bytes() if path.is_file() else None, str(path))

    @contextmanager
    def locked(self) -> Iterator[None]:
        with atomic.disk_errors_explained(self.folder, "the address"):
            (self.folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
            with atomic.lock(self.folder / ".lock"):
                mark = self.folder / indexes.MARK
                if not mark.is_file():
                    atomic.write(mark, indexes.MARK_CONTENT, self.folder / ".partial")
                yield

    def blob(self, digest: str) -> Path:
        algorithm, _, hexadecimal = digest.partition(":")
        if algorithm != "sha256" or not hexadecimal.isalnum():
            raise BundleError(f"digest {digest!r:.100}", where=str(self.folder), accepted="sha256")
        return self.folder / "blobs" / "sha256" / hexadecimal


def _names(folder: Path) -> list[str]:
    if folder.is_dir():
        return os.listdir(folder)
    return [folder.name] if os.path.lexists(folder) else []
