"""Semantic cache: answers to questions that are similar but not equal; pure.

A frame is everything in a request but its question: the bundle's digest, the engine, all options
and earlier messages. A question is compared with the questions of its own frame only. A frame holds
at most `entries` of them, the number that the threshold was chosen with (false_hits.py), because a
larger cache has more false hits. Least recently used entries are evicted.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .cache import ENTRY, size
from .false_hits import Vectors

SPARE = 4  # maximum ratio of allocated to used rows of a frame's matrix


@dataclass(eq=False)
class _Frame:
    """A server's cached questions of requests that are otherwise equal.

    owner: digest of the bundle that answered
    vectors: matrix of embeddings, one row each; used rows come first
    keys: key of each row
    rows: {key: row}, least recently used first
    by_hash: {hash of a vector: key}
    """

    owner: str
    vectors: Vectors
    keys: list[int] = field(default_factory=list)
    rows: OrderedDict[int, int] = field(default_factory=OrderedDict)
    by_hash: dict[bytes, int] = field(default_factory=dict)

    def add(self, key: int, vector: Vectors) -> None:
        row = len(self.keys)
        if row == len(self.vectors):
            self._resize(2 * row)
        self.vectors[row] = vector
        self.keys.append(key)
        self.rows[key] = row
        self.by_hash[_hash(vector)] = key

    def remove(self, key: int) -> None:
        """Remove one cached question's vector; the last row of the matrix moves into its place."""
        row, last = self.rows.pop(key), self.keys.pop()
        del self.by_hash[_hash(self.vectors[row])]
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
class _CachedAnswer:
    frame: bytes
    value: Any
    bytes: int


class SemanticCache:
    """LRU cache of a server's answers by the similarity of questions.

    most: maximum bytes
    entries: maximum questions per frame
    threshold: cosine similarity that a hit exceeds
    """

    def __init__(self, most: int, entries: int, threshold: float) -> None:
        self.most, self.entries, self.threshold, self.bytes = most, entries, threshold, 0
        self._frames: dict[bytes, _Frame] = {}
        self._entries: OrderedDict[int, _CachedAnswer] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, frame: bytes, vector: Vectors) -> tuple[Any, float] | None:
        """Return (cached answer to the most similar question, its cosine similarity).

        frame: digest of everything in the request but its question
        vector: normalized embedding of the question

        Returns None if no cached question of the frame is more similar than the threshold.
        """
        questions = self._frames.get(frame)
        if questions is None:
            return None
        alike = questions.vectors[: len(questions.keys)] @ vector
        row = int(np.argmax(alike))
        if not alike[row] > self.threshold:
            return None
        key = questions.keys[row]
        questions.rows.move_to_end(key)
        self._entries.move_to_end(key)
        return self._entries[key].value, float(alike[row])

    def put(self, owner: str, frame: bytes, vector: Vectors, value: Any) -> None:
        """Cache the answer to a question; an equal vector's answer is replaced.

        owner: digest of the bundle that answered
        frame: digest of everything in the request but its question
        vector: normalized embedding of the question

        An answer larger than the cache is not stored.
        """
        taken = ENTRY + len(frame) + SPARE * vector.nbytes + size(value)
        if taken > self.most:
            return
        questions = self._frames.get(frame)
        if questions is not None and (same := questions.by_hash.get(_hash(vector))) is not None:
            self._remove(same)
            questions = self._frames.get(frame)
        if questions is None:
            self._frames[frame] = questions = _Frame(owner, np.zeros((1, len(vector)), np.float32))
        questions.add(self._next, vector)
        self._entries[self._next] = _CachedAnswer(frame, value, taken)
        self._next += 1
        self.bytes += taken
        if len(questions.keys) > self.entries:
            self._remove(next(iter(questions.rows)))
        while self.bytes > self.most:
            self._remove(next(iter(self._entries)))

    def drop(self, owner: str) -> None:
        """Remove all answers of a bundle from the cache.

        owner: digest of the bundle
        """
        gone = [key for key, e in self._entries.items() if self._frames[e.frame].owner == owner]
        for key in gone:
            self._remove(key)

    def _remove(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.bytes -= entry.bytes
        questions = self._frames[entry.frame]
        questions.remove(key)
        if not questions.keys:
            del self._frames[entry.frame]


def _hash(vector: Vectors) -> bytes:
    return hashlib.blake2b(vector.tobytes(), digest_size=16).digest()
