"""Answers that were given before, for requests that are the same in every byte; pure.

A key holds the digest of the bundle (its contract and files), the engine, and the inputs: a new
version has other keys, so that nothing is ever flushed too late. What was used longest ago makes
room; an answer larger than all room is not kept. Of texts that are continued the options count as
well, and those whose tokens are drawn without a seed of the client's are not kept (recall.py).
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

ENTRY = 500  # bytes of an entry besides its answer: the key and its places in two tables


class Cache:
    """At most `most` bytes."""

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._entries: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Any:
        """What was put there; None where nothing is."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, value: Any) -> None:
        """Keep it, if there is room for it at all."""
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


def key_of(
    digest: str,
    engine: str,
    inputs: Sequence[str | bytes],
    pairs: Sequence[str | bytes] | None,
    options: str = "",
) -> bytes:
    """Alike for two requests only if they are the same: each part goes in with its kind and length,
    so that no two lists of parts are one text."""
    hashed = hashlib.sha256()
    parts: list[str | bytes] = [digest, engine, options, str(len(inputs)), *inputs, *(pairs or ())]
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else bytes(part)
        hashed.update(b"%s%d:" % (b"t" if isinstance(part, str) else b"b", len(data)))
        hashed.update(data)
    return hashed.digest()


def size(value: Any) -> int:
    """Bytes of an answer in memory."""
    total = sys.getsizeof(value)
    if isinstance(value, Mapping):
        return total + sum(size(k) + size(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return total + sum(map(size, value))
    if is_dataclass(value) and not isinstance(value, type):
        return total + sum(size(getattr(value, f.name)) for f in fields(value))
    return total
