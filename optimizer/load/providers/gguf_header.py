"""Check the header of a GGUF file before the gguf package opens the file.

That package and transformers create a Python object for every element that the header declares,
and a file of 1 kB can declare 2^60. Here each count is compared with the remaining bytes before its
elements are read.

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
"""{number of a type: bytes of a value}."""
FIELDS = 10_000  # Gemma 3 has 40
TENSORS = 100_000  # a mixture of 128 experts in 100 blocks has 50,000
ELEMENTS = 2_000_000  # of all arrays, 1.2 kB of memory each; 262,144 tokens have 1.3 million
KEY = 65_535  # maximum bytes, from the specification
TEXT = 64 << 20  # maximum bytes of a string; a tokenizer.json has 20 MB
AXES = 4  # GGML_MAX_DIMS
FIX = "Use the float checkpoint it was made from, or get the file again."


def check(file: Path) -> None:
    """Raise CheckpointError for a header that is cut off, or declares more than the file can hold
    or any model has."""
    with reading(file, fix=FIX), file.open("rb") as content:
        _Header(content, file).check()


class _Header:
    """Reader of a header. content: the file, at its first byte."""

    def __init__(self, content: BinaryIO, file: Path) -> None:
        self._content, self._file = content, file
        self._size = self._left = file.stat().st_size
        self._order = "<"
        self._elements = 0

    def check(self) -> None:
        magic, version = self._read_bytes(4, "the magic"), self._read_bytes(4, "the version")
        if magic != b"GGUF":
            raise self._error(f"it begins with {magic!r}", "GGUF files")
        if version[:2] == b"\0\0":  # the gguf package's test of byte order
            self._order = ">"
        number = struct.unpack(f"{self._order}I", version)[0]
        if number not in (2, 3):
            raise self._error(f"it has version {number}", "versions 2 and 3")
        tensors = self._read_count("weight tensors", TENSORS, least=24)
        fields = self._read_count("metadata fields", FIELDS, least=13)
        for _ in range(fields):
            key = self._read_string("the name of a metadata field", KEY).decode("utf-8", "replace")
            self._check_value(self._read_integer("I", key), f"{key!a:.100}")
        self._check_tensors(tensors)

    def _check_value(self, kind: int, key: str) -> None:
        if kind == STRING:
            self._read_string(key, TEXT)
        elif kind in NUMBERS:
            self._skip(NUMBERS[kind], key)
        elif kind == ARRAY:
            kind = self._read_integer("I", key)
            if kind != STRING and kind not in NUMBERS:
                raise self._error(f"{key} is an array of type {kind}", "strings or numbers")
            count = self._read_count(f"elements of {key}", ELEMENTS, least=NUMBERS.get(kind, 8))
            self._elements += count
            if self._elements > ELEMENTS:
                raise self._error(
                    f"its arrays have more than {ELEMENTS:,} elements", f"{ELEMENTS:,} or fewer"
                )
            if kind == STRING:
                for _ in range(count):
                    self._read_string(key, TEXT)
            else:
                self._skip(count * NUMBERS[kind], key)
        else:
            raise self._error(f"{key} has type {kind}", "types 0 to 12")

    def _check_tensors(self, count: int) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        blocks = {int(kind): GGML_QUANT_SIZES[kind] for kind in GGMLQuantizationType}
        described = []
        for _ in range(count):
            key = self._read_string("the name of a tensor", KEY).decode("utf-8", "replace")
            name = f"tensor {key!a:.100}"
            axes = self._read_integer("I", name)
            if axes > AXES:
                raise self._error(f"{name} has {axes:,} axes", f"{AXES} or fewer")
            numbers = 1
            for _ in range(axes):
                numbers *= self._read_integer("Q", name)
            kind, offset = self._read_integer("I", name), self._read_integer("Q", name)
            if kind not in blocks:
                raise self._error(f"{name} has type {kind}", "types of the gguf package")
            values, size = blocks[kind]
            described.append((name, -(-numbers // values) * size, offset))
        total = 0
        for name, size, offset in described:
            total += size
            if offset + size > self._left or total > self._left:
                raise self._error(
                    f"{name} has {size:,} bytes from byte {offset:,} of the tensors' data, and all "
                    f"tensors up to it {total:,}, but the data have {self._left:,}",
                    "tensors that lie inside the file and do not overlap",
                )

    def _read_count(self, what: str, most: int, least: int) -> int:
        """Read a count of elements.

        least: minimum bytes of one element
        """
        count = self._read_integer("Q", f"the number of {what}")
        fitting = min(most, self._left // least)
        if count > fitting:
            raise self._error(
                f"it declares {count:,} {what}, and {self._left:,} bytes are left",
                f"{fitting:,} or fewer",
            )
        return count

    def _read_string(self, what: str, most: int) -> bytes:
        size = self._read_integer("Q", what)
        if size > min(most, self._left):
            raise self._error(
                f"{what} has {size:,} bytes, and {self._left:,} are left",
                f"{min(most, self._left):,} or fewer",
            )
        return self._read_bytes(size, what)

    def _read_integer(self, form: str, what: str) -> int:
        size = struct.calcsize(form)
        return int(struct.unpack(f"{self._order}{form}", self._read_bytes(size, what))[0])

    def _skip(self, size: int, what: str) -> None:
        self._take(size, what)
        self._content.seek(size, 1)

    def _read_bytes(self, size: int, what: str) -> bytes:
        self._take(size, what)
        return self._content.read(size)

    def _take(self, size: int, what: str) -> None:
        if size > self._left:
            raise self._error(
                f"it ends at byte {self._size:,}, within {what}", "a complete GGUF file"
            )
        self._left -= size

    def _error(self, problem: str, accepted: str) -> CheckpointError:
        return CheckpointError(problem, where=str(self._file), accepted=accepted, fix=FIX)
