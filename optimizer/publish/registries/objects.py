"""What a layout in an object store asks of the store: objects whole or not at all, and a write that
happens only while an object is what was read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from optimizer.harness.errors import BundleError
from optimizer.publish.registries.place import Blob

LARGEST_READ = 64 << 20  # bytes of an object that is kept in memory: an index, a manifest


@dataclass(frozen=True)
class Stored:
    """The bytes of an object, and how the store calls this version of it: an ETag, a generation."""

    data: bytes
    version: str


class Objects(Protocol):
    """The objects below a prefix of a bucket; names are relative to it, e.g. "index.json".

    Whoever reads sees an object as one write left it, the last one (S3, Google and Azure promise
    this). Errors: MachineError where the store does not answer or does not allow it.
    """

    where: str
    """The bucket and the prefix, for messages."""
    no_version: str
    """A version that no object has."""

    def read(self, name: str) -> Stored | None:
        """None where there is no such object. Raises BundleError above LARGEST_READ."""

    def write(self, name: str, data: bytes, expected: str) -> bool:
        """Write the object if its version is `expected`, "" for none yet. False, and nothing is
        written, where it is another."""

    def has(self, name: str, digest: str) -> bool:
        """Whether the object is there and, as far as the store says, has this digest."""

    def put(self, name: str, blob: Blob) -> None:
        """Write the object, whole or not at all. Raises BundleError for a file that is not what
        the blob's digest says."""

    def part(self, name: str, start: int, end: int) -> bytes | None:
        """The bytes from start up to end, fewer where the object ends; None where it is not."""

    def sizes(self, folder: str) -> dict[str, int]:
        """{name: bytes} of the objects whose names begin with "folder/"."""

    def remove(self, names: Collection[str]) -> None:
        """Remove objects; what is there no more is no error."""

    def close(self) -> None:
        """Let go of connections."""


def changed(blob: Blob) -> BundleError:
    """For a file that is not what its digest says any more."""
    return BundleError("it changed while it was published", where=f"{blob.content!s:.200}")


def too_large(size: int, where: str) -> BundleError:
    return BundleError(f"{size:,} bytes, above {LARGEST_READ:,}", where=where)
