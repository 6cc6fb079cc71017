"""Read and write a folder in the OCI image layout, for sites without a network and other tools.

    oci-layout                    {"imageLayoutVersion": "1.0.0"}
    index.json                    a descriptor per tag, in org.opencontainers.image.ref.name
    blobs/sha256/<hex>            everything else

Blobs and the index appear complete or not at all, and writers hold a lock. Referrers are listed in
an index under the tag sha256-<hex>, as in a registry without a referrers API, so that other tools
copy them by that tag.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from optimizer.foundation import atomic
from optimizer.foundation.buckets.blob import Blob, digest_of
from optimizer.foundation.buckets.objects import LARGEST_READ, build_size_error, changed_error
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.harness.errors import BundleError
from optimizer.publish.registries import index as indexes
from optimizer.publish.registries.place import (
    LARGEST_MANIFEST,
    Json,
    add_referrer,
    describe,
    fallback_tag,
    is_fallback_tag,
    parse_document,
    parse_referrers,
)
from optimizer.store import digest_file


class OciLayout:
    """Registry in a local folder, as an OCI layout, which is made at the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        leftovers = {"blobs", ".lock", ".partial"}  # of a run that was killed at its start
        if not (folder / indexes.MARK).is_file() and {*_names(folder)} - leftovers:
            raise RecipeError(
                "the folder is not an OCI layout: it has no file oci-layout",
                where=str(folder),
                accepted="a layout, an empty folder, or a new path",
            )

    def has(self, blob: Blob) -> bool:
        return self.blob(blob.digest).is_file()

    def send(self, blob: Blob) -> None:
        with self.lock():
            self._send(blob)

    def _send(self, blob: Blob) -> None:
        """Write a blob of a bundle into the layout; the caller holds the lock, because all writers
        share one partial file."""
        final = self.blob(blob.digest)
        partial = self.folder / ".partial"
        if isinstance(blob.content, bytes):
            partial.write_bytes(blob.content)
        else:
            shutil.copyfile(blob.content, partial)
        if f"sha256:{digest_file(partial)}" != blob.digest:
            raise changed_error(blob)
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
        is_digest = reference.startswith("sha256:")
        digest = reference if is_digest else self.resolve_tags().get(reference)
        if digest is None or not self.blob(digest).is_file():
            return None
        if self.blob(digest).stat().st_size > LARGEST_MANIFEST:
            raise BundleError("the manifest is above 4 MiB", where=str(self.blob(digest)))
        data = self.blob(digest).read_bytes()
        if digest_of(data) != digest:
            raise BundleError("its digest is not its name", where=str(self.blob(digest)))
        return data

    def write_manifest(self, data: bytes, tag: str = "") -> None:
        with self.lock():
            self._check_blobs(data)
            self._send(Blob.describe(data))
            if tag:
                self._set_tags({tag: data})

    def _check_blobs(self, data: bytes) -> None:
        """Raise MachineError where a prune has meanwhile removed a blob that the manifest needs."""
        digests = indexes.list_referenced_digests(parse_document(data, "manifest"))
        missing = [d for d in digests if not self.blob(d).is_file()]
        if missing:
            raise MachineError(
                f"{missing[0]} was removed meanwhile",
                where=str(self.folder),
                fix="Run the same command again.",
            )

    def write_referrer(self, data: bytes, subject: str) -> None:
        tag = fallback_tag(subject)
        with self.lock():
            self._check_blobs(data)
            self._send(Blob.describe(data))
            index = add_referrer(self.read_manifest(tag), describe(data))
            self._send(Blob.describe(index))
            self._set_tags({tag: index})

    def referrers(self, subject: str) -> list[Json]:
        return parse_referrers(self.read_manifest(fallback_tag(subject)))

    def tags(self) -> list[str]:
        return sorted(tag for tag in self.resolve_tags() if not is_fallback_tag(tag))

    def move(self, tags: Mapping[str, bytes], last: str, expected: str) -> bool:
        """Write all tags in one change of the index: a reader sees all of them moved, or none."""
        with self.lock():
            if self.resolve_tags().get(last, "") != expected:
                return False
            for data in tags.values():
                self._check_blobs(data)
                self._send(Blob.describe(data))
            self._set_tags(tags)
            return True

    def drop_tags(self, tags: Collection[str]) -> None:
        """Remove tags from the registry's index; the caller holds the lock."""
        self._write_index(indexes.remove_tags(self._index(), tags))

    def blobs(self) -> dict[str, int]:
        folder = self.folder / "blobs" / "sha256"
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        return {f"sha256:{path.name}": path.stat().st_size for path in paths}

    def drop_blobs(self, digests: Collection[str]) -> None:
        """Delete the layout's files of these blobs; the caller holds the lock."""
        for digest in digests:
            self.blob(digest).unlink()

    def close(self) -> None:
        """Do nothing: an OCI layout keeps no file open."""

    def _set_tags(self, tags: Mapping[str, bytes]) -> None:
        self._write_index(indexes.add_tags(self._index(), tags))

    def _write_index(self, data: bytes) -> None:
        atomic.write(self.folder / indexes.FILE, data, self.folder / ".partial")

    def resolve_tags(self) -> dict[str, str]:
        return indexes.resolve_tags(self._index())

    def _index(self) -> Json:
        path = self.folder / indexes.FILE
        if path.is_file() and (size := path.stat().st_size) > LARGEST_READ:
            raise build_size_error(size, str(path))
        return indexes.read(path.read_bytes() if path.is_file() else None, str(path))

    @contextmanager
    def lock(self) -> Iterator[None]:
        with atomic.explain_disk_errors(self.folder, "the address"):
            (self.folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
            with atomic.lock(self.folder / ".lock"):
                mark = self.folder / indexes.MARK
                if not mark.is_file():
                    atomic.write(mark, indexes.MARK_CONTENT, self.folder / ".partial")
                yield

    def blob(self, digest: str) -> Path:
        algorithm, _, hexadecimal = digest.partition(":")
        if algorithm != "sha256" or not hexadecimal.isalnum():
            raise BundleError(f"{digest!r:.100} is not a SHA-256 digest", where=str(self.folder))
        return self.folder / "blobs" / "sha256" / hexadecimal


def _names(folder: Path) -> list[str]:
    if folder.is_dir():
        return os.listdir(folder)
    return [folder.name] if os.path.lexists(folder) else []
