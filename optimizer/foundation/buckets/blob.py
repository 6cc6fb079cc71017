"""Bytes in memory or in a file, named by their digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True)
class Blob:
    """Bytes with their digest, "sha256:..."; content: the bytes, or the file that holds them."""

    digest: str
    size: int
    content: Path | bytes

    @classmethod
    def describe(cls, data: bytes) -> Blob:
        return cls(digest_of(data), len(data), data)

    def read(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()
