"""Check and read the header of a GGUF file before the gguf package opens the file.

That package and transformers create a Python object for every element that the header declares,
and a file of 1 kB can declare 2^60. Here each count is compared with the remaining bytes before its
elements are read. The fields and sizes that load needs come from here too, because the package
takes seconds for the vocabulary of a tokenizer.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3):

    "GGUF" version:u32 tensors:u64 fields:u64
    fields   key:string type:u32 value; a string is size:u64 bytes, an array type:u32 count:u64
             values
    tensors  name:string axes:u32 size:u64 of each, type:u32 offset:u64
    data     of the tensors, each at its offset
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.reading import reading

STRING, ARRAY = 8, 9
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""{number of a type: its letter in struct}."""
FIELDS = 10_000  # Gemma 3 has 40
TENSORS = 100_000  # a mixture of 128 experts in 100 blocks has 50,000
ELEMENTS = 2_000_000  # of all arrays, 1.2 kB of memory each; 262,144 tokens have 1.3 million
KEY = 65_535  # maximum bytes, from the specification
TEXT = 64 << 20  # maximum bytes of a string; a tokenizer.json has 20 MB
AXES = 4  # GGML_MAX_DIMS
FIX = "Use the float checkpoint it was made from, or get the file again."


@dataclass(frozen=True)
class GgufHeader:
    """Header of a GGUF file.

    fields: metadata by key, without arrays of strings
    tensors: {tensor: number of values}
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, int]


def read(file: Path) -> GgufHeader:
    """Raise CheckpointError for a header that is cut off, or declares more than the file can hold
    or any model has."""
    with reading(file, fix=FIX), file.open("rb") as content:
        return _Reader(content, file).read()


class _Reader:
    """Reader of the header of a GGUF file. content: the file, at its first byte."""

    def __init__(self, content: BinaryIO, file: Path) -> None:
        self._content, self._file = content, file
        self._size = self._left = file.stat().st_size
        self._order = "<"
        self._elements = 0

    def read(self) -> GgufHeader:
        """Read the header of a GGUF file, comparing each count with the bytes that remain."""
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
        values = {}
        for _ in range(fields):
            key = self._read_string("the name of a metadata field", KEY).decode("utf-8", "replace")
            values[key] = self._read_value(self._read_integer("I", key), f"{key!a:.100}")
        return GgufHeader(values, self._read_tensors(tensors))

    def _read_value(self, kind: int, key: str) -> Any:
        """Read the value of a metadata field in a GGUF header; None for an array of strings."""
        if kind == STRING:
            return self._read_string(key, TEXT).decode("utf-8", "replace")
        if kind in NUMBERS:
            return self._read_numbers(NUMBERS[kind], 1, key)[0]
        if kind == ARRAY:
            kind = self._read_integer("I", key)
            if kind != STRING and kind not in NUMBERS:
                raise self._error(f"{key} is an array of type {kind}", "strings or numbers")
            count = self._read_count(f"elements of {key}", ELEMENTS, least=_size(kind))
            self._elements += count
            if self._elements > ELEMENTS:
                raise self._error(
                    f"its arrays have more than {ELEMENTS:,} elements", f"{ELEMENTS:,} or fewer"
                )
            if kind != STRING:
                return list(self._read_numbers(NUMBERS[kind], count, key))
            for _ in range(count):
                self._read_string(key, TEXT)
            return None
        raise self._error(f"{key} has type {kind}", "types 0 to 12")

    def _read_tensors(self, count: int) -> dict[str, int]:
        """Read the descriptions of `count` tensors in a GGUF header; returns {tensor: number of
        values}."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        blocks = {int(kind): GGML_QUANT_SIZES[kind] for kind in GGMLQuantizationType}
        described, sizes = [], {}
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
            sizes[key] = numbers
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
        return sizes

    def _read_count(self, what: str, most: int, least: int) -> int:
        """Read a count of elements in a GGUF header, which must fit the file.

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

    def _read_integer(self, layout: str, what: str) -> int:
        size = struct.calcsize(layout)
        return int(struct.unpack(f"{self._order}{layout}", self._read_bytes(size, what))[0])

    def _read_numbers(self, letter: str, count: int, what: str) -> tuple[Any, ...]:
        layout = f"{self._order}{count}{letter}"
        return struct.unpack(layout, self._read_bytes(struct.calcsize(layout), what))

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


def _size(kind: int) -> int:
    """Return the fewest bytes that a value of a type takes in a GGUF header; a string begins with
    its size."""
    return struct.calcsize(f"<{NUMBERS[kind]}") if kind in NUMBERS else 8
