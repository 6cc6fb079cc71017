"""Exact cache of answers: an LRU cache keyed by every byte of a request; pure.

A key holds the digest of the bundle (its contract and files), the engine, the inputs and, for text
generation, the options. A new version has other keys, so no entry is ever stale. Texts sampled
without a seed of the client are not stored (completion_cache.py). An answer larger than the cache
is not stored.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

ENTRY = 500  # bytes of an entry without its answer: the key, and its rows in two tables


class Cache:
    """Cache of a server's answers by key, which drops the least recently used ones.

    most: maximum bytes of all values
    """

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._entries: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Any:
        """Return the cached answer to a request, by its key, and mark it as just used; None without
        one."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, value: Any) -> None:
        """Store an answer, unless it is larger than the cache."""
        taken = ENTRY + size(value)
        _, before = self._entries.pop(key, (None, 0))
        self.bytes -= before
        if taken > self.most:
            return
        self._entries[key] = (value, taken)
        self.bytes += taken
        while self.bytes > self.most:
            _, (_, freed) = self._entries.popitem(last=False)
            self.bytes -= freed


def cache_key(
    digest: str,
    engine: str,
    inputs: Sequence[str | bytes | tuple[int, ...]],
    pairs: Sequence[str | bytes] | None,
    options: str = "",
) -> bytes:
    """Hash a request to the server to its cache key.

    digest: digest of the bundle
    engine: name of the engine
    inputs, pairs: inputs, and their second texts; None without any
    options: options that change the answer, as JSON

    Each part is hashed with its type and length, so that different requests have different keys.
    """
    hashed = hashlib.sha256()
    for part in (digest, engine, options, str(len(inputs)), *inputs, *(pairs or ())):
        if isinstance(part, str):
            kind, data = b"t", part.encode("utf-8", "surrogatepass")
        elif isinstance(part, tuple):
            kind, data = b"i", repr(part).encode()
        else:
            kind, data = b"b", part
        hashed.update(b"%s%d:" % (kind, len(data)))
        hashed.update(data)
    return hashed.digest()


def size(value: Any) -> int:
    """Return the bytes that a server's cached answer occupies in memory."""
    total = sys.getsizeof(value)
    if isinstance(value, Mapping):
        return total + sum(size(k) + size(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return total + sum(map(size, value))
    if is_dataclass(value) and not isinstance(value, type):
        return total + sum(size(getattr(value, f.name)) for f in fields(value))
    return total
