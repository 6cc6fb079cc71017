"""A GGUF file's header, looked at before the gguf package opens the file.

That package, and transformers, make a Python object of every element that the header names, as many
as it says there are: a file of 1 kB can name 2^60. Here each count is held against the bytes that
are left, before anything is read of it, and nothing is kept but the tensors' sizes.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3):

    "GGUF" version:u32 tensors:u64 fields:u64
    fields   key:string type:u32 value; a string is size:u64 bytes, an array type:u32 count:u64
             values
    tensors  name:string axes:u32 size:u64 of each, type:u32 offset:u64
    data     of the tensors, each at its offset
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.reading import reading

STRING, ARRAY = 8, 9
NUMBERS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by the number of its type."""
FIELDS = 10_000  # Gemma 3 has 40
TENSORS = 100_000  # a mixture of 128 experts in 100 blocks has 50,000
ELEMENTS = 2_000_000  # of all arrays, which take 1.2 kB each there; 262,144 tokens have 1.3 million
KEY = 65_535  # bytes, by the specification
TEXT = 64 << 20  # bytes of a string; a whole tokenizer.json has 20 MB
AXES = 4  # GGML_MAX_DIMS
FIX = "Use the float checkpoint it was made from, or get the file again."


def check(file: Path) -> None:
    """Raise CheckpointError where the header is cut, or names more than the file can hold or any
    model has."""
    with reading(file, fix=FIX), file.open("rb") as content:
        _Header(content, file).check()


class _Header:
    """content: at its first byte."""

    def __init__(self, content: BinaryIO, file: Path) -> None:
        self._content, self._file = content, file
        self._size = self._left = file.stat().st_size
        self._order = "<"
        self._elements = 0

    def check(self) -> None:
        magic, version = self._bytes(4, "the magic"), self._bytes(4, "the version")
        if magic != b"GGUF":
            raise self._refused(f"it begins with {magic!r}", "GGUF files")
        if version[:2] == b"\0\0":  # as the gguf package tells the order of bytes
            self._order = ">"
        number = struct.unpack(f"{self._order}I", version)[0]
        if number not in (2, 3):
            raise self._refused(f"it has version {number}", "versions 2 and 3")
        tensors = self._count("tensors", TENSORS, least=24)
        fields = self._count("metadata fields", FIELDS, least=13)
        for _ in range(fields):
            key = self._string("the name of a metadata field", KEY).decode("utf-8", "replace")
            self._value(self._whole("I", key), f"{key!a:.100}")
        self._tensors(tensors)

    def _value(self, kind: int, key: str) -> None:
        if kind == STRING:
            self._string(key, TEXT)
        elif kind in NUMBERS:
            self._skip(NUMBERS[kind], key)
        elif kind == ARRAY:
            kind = self._whole("I", key)
            if kind != STRING and kind not in NUMBERS:
                raise self._refused(f"{key} is an array of type {kind}", "strings or numbers")
            count = self._count(f"elements of {key}", ELEMENTS, least=NUMBERS.get(kind, 8))
            self._elements += count
            if self._elements > ELEMENTS:
                raise self._refused(
                    f"its arrays have more than {ELEMENTS:,} elements", f"{ELEMENTS:,} or fewer"
                )
            if kind == STRING:
                for _ in range(count):
                    self._string(key, TEXT)
            else:
                self._skip(count * NUMBERS[kind], key)
        else:
            raise self._refused(f"{key} has type {kind}", "types 0 to 12")

    def _tensors(self, count: int) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        blocks = {int(kind): GGML_QUANT_SIZES[kind] for kind in GGMLQuantizationType}
        described = []
        for _ in range(count):
            key = self._string("the name of a tensor", KEY).decode("utf-8", "replace")
            name = f"tensor {key!a:.100}"
            axes = self._whole("I", name)
            if axes > AXES:
                raise self._refused(f"{name} has {axes:,} axes", f"{AXES} or fewer")
            numbers = 1
            for _ in range(axes):
                numbers *= self._whole("Q", name)
            kind, offset = self._whole("I", name), self._whole("Q", name)
            if kind not in blocks:
                raise self._refused(f"{name} has type {kind}", "types that the gguf package knows")
            values, size = blocks[kind]
            described.append((name, -(-numbers // values) * size, offset))
        total = 0
        for name, size, offset in described:
            total += size
            if offset + size > self._left or total > self._left:
                raise self._refused(
                    f"{name} takes {size:,} bytes from byte {offset:,} of the tensors' data, which "
                    f"has {self._left:,}; all tensors up to it {total:,}",
                    "tensors that the file holds, each by itself",
                )

    def _count(self, what: str, most: int, least: int) -> int:
        """Read a count.

        least: bytes of one thing that is counted.
        """
        count = self._whole("Q", f"the number of {what}")
        fitting = min(most, self._left // least)
        if count > fitting:
            raise self._refused(
                f"it says that it has {count:,} {what}, and {self._left:,} bytes are left",
                f"{fitting:,} or fewer",
            )
        return count

    def _string(self, what: str, most: int) -> bytes:
        size = self._whole("Q", what)
        if size > min(most, self._left):
            raise self._refused(
                f"{what} has {size:,} bytes, and {self._left:,} are left",
                f"{min(most, self._left):,} or fewer",
            )
        return self._bytes(size, what)

    def _whole(self, form: str, what: str) -> int:
        size = struct.calcsize(form)
        return int(struct.unpack(f"{self._order}{form}", self._bytes(size, what))[0])

    def _skip(self, size: int, what: str) -> None:
        self._take(size, what)
        self._content.seek(size, 1)

    def _bytes(self, size: int, what: str) -> bytes:
        self._take(size, what)
        return self._content.read(size)

    def _take(self, size: int, what: str) -> None:
        if size > self._left:
            raise self._refused(
                f"it ends at byte {self._size:,}, within {what}", "a whole GGUF file"
            )
        self._left -= size

    def _refused(self, problem: str, accepted: str) -> CheckpointError:
        return CheckpointError(problem, where=str(self._file), accepted=accepted, fix=FIX)
