"""KV cache of prompt prefixes: a system prompt that requests share is prefilled once.

An entry is one whole piece of a prompt (slots.cut_pieces), under a hash of its adapter and all
tokens up to its end. A prompt that begins with the same pieces gets copies of their keys and values
instead of computing them. The cut is part of the result: another piece length runs other kernels,
whose sums round in another order. The last piece is always read, because its scores choose the
first token. Law (tested; measured at warm-up, generation.prefixes_hold): no bit of a score changes.

Least recently used entries are evicted, a prompt's end before its beginning. Each version of a
model has its own cache. Used by the model's thread alone (decoding.py).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ...inputs.batch import Array
from ...runtimes.slots import Slots

ENTRY = 500  # bytes of an entry without its arrays


class PrefixCache:
    """A server's LRU cache of the keys and values of prompt pieces.

    slots: slots whose KV cache is read and written
    piece: tokens per piece
    most: maximum bytes
    """

    def __init__(self, slots: Slots, piece: int, most: int) -> None:
        self.piece, self.most, self.bytes = piece, most, 0
        self._slots = slots
        self._entries: OrderedDict[bytes, Sequence[Array]] = OrderedDict()

    def __len__(self) -> int:
        """Number of pieces."""
        return len(self._entries)

    def length(self, ids: Sequence[int], adapter: str = "") -> int:
        """Return the number of tokens at the beginning of a prompt that the server has cached.

        These are whole pieces, and never the last piece of the prompt.
        """
        stop = 0
        while stop + self.piece + 1 < len(ids):
            if _key(ids, stop + self.piece, adapter) not in self._entries:
                break
            stop += self.piece
        return stop

    def restore(self, text: int, ids: Sequence[int], stop: int, adapter: str = "") -> None:
        """Copy the KV cache of a prompt's first `stop` tokens into an empty slot.

        text: number of the slot
        stop: result of `length`, with no `keep` in between
        """
        keys = [_key(ids, end, adapter) for end in range(self.piece, stop + 1, self.piece)]
        for key in keys:
            self._slots.append(text, self._entries[key])
        for key in reversed(keys):  # the beginning is evicted last
            self._entries.move_to_end(key)

    def keep(self, text: int, ids: Sequence[int], start: int, stop: int, adapter: str = "") -> None:
        """Store tokens start..stop of `ids`, just read into slot `text`, if they are a whole
        piece."""
        if stop - start != self.piece or start % self.piece:
            return
        key = _key(ids, stop, adapter)
        if key not in self._entries:
            arrays = self._slots.copy_tokens(text, start, stop)
            taken = _bytes(arrays)
            if taken > self.most:
                return
            self._entries[key] = arrays
            self.bytes += taken
        for end in range(stop, 0, -self.piece):
            if _key(ids, end, adapter) in self._entries:
                self._entries.move_to_end(_key(ids, end, adapter))
        while self.bytes > self.most:
            _, arrays = self._entries.popitem(last=False)
            self.bytes -= _bytes(arrays)


def _key(ids: Sequence[int], stop: int, adapter: str) -> bytes:
    tokens = np.asarray(ids[:stop], np.int64).tobytes()
    return hashlib.sha256(adapter.encode() + b"\0" + tokens).digest()


def _bytes(arrays: Sequence[Array]) -> int:
    return ENTRY + sum(array.nbytes for array in arrays)
