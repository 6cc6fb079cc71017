"""Answers that were given before, for questions that are alike but not the same; pure.

A frame is all of a request but the question: the bundle's digest, the engine, every option, every
message before it. A question is compared with those of its own frame alone, of which at most
`entries` are kept, as many as the threshold was chosen with: the more there are to compare with,
the more often another's is alike by chance. What was used longest ago makes room.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .cache import ENTRY, size
from .false_hits import Vectors

SPARE = 4  # rows of a frame's matrix for each that is in use, at most: it doubles, and is halved


@dataclass(eq=False)
class _Frame:
    """owner: the digest of the bundle. vectors: the rows in use come first. keys: of each row.
    rows: of each key, the one used longest ago first. known: the keys by hashes of vectors."""

    owner: str
    vectors: Vectors
    keys: list[int] = field(default_factory=list)
    rows: OrderedDict[int, int] = field(default_factory=OrderedDict)
    known: dict[bytes, int] = field(default_factory=dict)

    def add(self, key: int, vector: Vectors) -> None:
        row = len(self.keys)
        if row == len(self.vectors):
            self._resize(2 * row)
        self.vectors[row] = vector
        self.keys.append(key)
        self.rows[key] = row
        self.known[_hash(vector)] = key

    def remove(self, key: int) -> None:
        """The last row takes its place."""
        row, last = self.rows.pop(key), self.keys.pop()
        del self.known[_hash(self.vectors[row])]
        if last != key:
            self.vectors[row], self.keys[row], self.rows[last] = (
                self.vectors[len(self.keys)],
                last,
                row,
            )
        if SPARE * len(self.keys) < len(self.vectors):
            self._resize(len(self.vectors) // 2)

    def _resize(self, rows: int) -> None:
        used = len(self.keys)
        resized = np.zeros((rows, self.vectors.shape[1]), np.float32)
        resized[:used] = self.vectors[:used]
        self.vectors = resized


@dataclass(frozen=True)
class _Entry:
    frame: bytes
    value: Any
    bytes: int


class SemanticCache:
    """At most `most` bytes, and `entries` of each frame. threshold: a hit is more alike."""

    def __init__(self, most: int, entries: int, threshold: float) -> None:
        self.most, self.entries, self.threshold, self.bytes = most, entries, threshold, 0
        self._frames: dict[bytes, _Frame] = {}
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, frame: bytes, vector: Vectors) -> tuple[Any, float] | None:
        """The value of the question that is most alike, and how alike it is; None for none. vector:
        of length 1."""
        kept = self._frames.get(frame)
        if kept is None:
            return None
        alike = kept.vectors[: len(kept.keys)] @ vector
        row = int(np.argmax(alike))
        if not alike[row] > self.threshold:
            return None
        key = kept.keys[row]
        kept.rows.move_to_end(key)
        self._entries.move_to_end(key)
        return self._entries[key].value, float(alike[row])

    def put(self, owner: str, frame: bytes, vector: Vectors, value: Any) -> None:
        """Keep it in the place of what this very vector had, if there is room for it at all. owner:
        see `drop`."""
        taken = ENTRY + len(frame) + SPARE * vector.nbytes + size(value)
        if taken > self.most:
            return
        kept = self._frames.get(frame)
        if kept is not None and (same := kept.known.get(_hash(vector))) is not None:
            self._remove(same)
            kept = self._frames.get(frame)
        if kept is None:
            self._frames[frame] = kept = _Frame(owner, np.zeros((1, len(vector)), np.float32))
        kept.add(self._next, vector)
        self._entries[self._next] = _Entry(frame, value, taken)
        self._next += 1
        self.bytes += taken
        if len(kept.keys) > self.entries:
            self._remove(next(iter(kept.rows)))
        while self.bytes > self.most:
            self._remove(next(iter(self._entries)))

    def drop(self, owner: str) -> None:
        """Keep nothing of this bundle."""
        gone = [key for key, e in self._entries.items() if self._frames[e.frame].owner == owner]
        for key in gone:
            self._remove(key)

    def _remove(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.bytes -= entry.bytes
        kept = self._frames[entry.frame]
        kept.remove(key)
        if not kept.keys:
            del self._frames[entry.frame]


def _hash(vector: Vectors) -> bytes:
    return hashlib.blake2b(vector.tobytes(), digest_size=16).digest()
