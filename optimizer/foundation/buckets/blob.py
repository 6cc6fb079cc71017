"""Bytes in memory or in a file, with their SHA-256."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


def digest_of(data: bytes) -> str:
    """Compute the digest "sha256:..." by which a blob in a registry or bucket is found."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True)
class Blob:
    """Bytes of an object in a bucket or registry with their digest, "sha256:...".

    content: the bytes, or the file that holds them
    """

    digest: str
    size: int
    content: Path | bytes

    @classmethod
    def describe(cls, data: bytes) -> Blob:
        """Build a Blob of bytes in memory."""
        return cls(digest_of(data), len(data), data)

    def read(self) -> bytes:
        """Return the bytes, read from the file where `content` is one."""
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()
