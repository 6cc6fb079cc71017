"""The key/value cache of prompts' beginnings, kept for prompts that begin alike: a system prompt is
read once.

A prompt is read in pieces (slots.pieces), and a piece's keys and values follow from its tokens,
from all before it, and from where it was cut: another cut is another kernel, whose sums round in
another order. So what is kept is whole pieces of the one size, each under a hash of all tokens up
to its end; a prompt that begins with them has the same pieces there, and their bytes are copied
into its slot instead of computed. The last piece is always read: its scores are what follows the
prompt. Law (tested; measured at the start: arrivals.prefixes_hold): no bit of a score changes.

What was used longest ago makes room, a prompt's end before its beginning. A version of a model has
a cache of its own, so that a new one begins empty. For the model's thread alone.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ...inputs.batch import Array
from ...runtimes.slots import Slots

ENTRY = 500  # bytes of an entry besides its arrays


class PrefixCache:
    """At most `most` bytes. piece: tokens of each."""

    def __init__(self, slots: Slots, piece: int, most: int) -> None:
        self.piece, self.most, self.bytes = piece, most, 0
        self._slots = slots
        self._entries: OrderedDict[bytes, Sequence[Array]] = OrderedDict()

    def __len__(self) -> int:
        """Pieces."""
        return len(self._entries)

    def length(self, ids: Sequence[int]) -> int:
        """Tokens at the beginning of a prompt that need not be read: whole pieces, never the last
        one, which is longer by a token where it would leave one."""
        stop = 0
        while stop + self.piece + 1 < len(ids) and _key(ids, stop + self.piece) in self._entries:
            stop += self.piece
        return stop

    def restore(self, text: int, ids: Sequence[int], stop: int) -> None:
        """Put the first `stop` tokens of a prompt into the empty slot of a text. stop: of
        `length`, nothing having been kept since."""
        keys = [_key(ids, end) for end in range(self.piece, stop + 1, self.piece)]
        for key in keys:
            self._slots.append(text, self._entries[key])
        for key in reversed(keys):  # the beginning was used last: it goes last
            self._entries.move_to_end(key)

    def keep(self, text: int, ids: Sequence[int], start: int, stop: int) -> None:
        """Keep what a text's slot has of the piece that was just read, if it is whole."""
        if stop - start != self.piece or start % self.piece:
            return
        key = _key(ids, stop)
        if key not in self._entries:
            arrays = self._slots.copied(text, start, stop)
            taken = _bytes(arrays)
            if taken > self.most:
                return
            self._entries[key] = arrays
            self.bytes += taken
        for end in range(stop, 0, -self.piece):
            if _key(ids, end) in self._entries:
                self._entries.move_to_end(_key(ids, end))
        while self.bytes > self.most:
            _, arrays = self._entries.popitem(last=False)
            self.bytes -= _bytes(arrays)


def _key(ids: Sequence[int], stop: int) -> bytes:
    return hashlib.sha256(np.asarray(ids[:stop], np.int64).tobytes()).digest()


def _bytes(arrays: Sequence[Array]) -> int:
    return ENTRY + sum(array.nbytes for array in arrays)
