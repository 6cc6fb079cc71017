"""Check data files before their libraries read them, which could crash or exhaust memory: deeply
nested JSON or many names, csv with endless lines, small files that decompress to large ones.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from optimizer.data import parquet_file
from optimizer.foundation.errors import DataError
from optimizer.foundation.reading import reading

COLUMNS = 1_000  # maximum of a table; at most four are read
HEADER = 1_000_000  # maximum bytes of a csv file's first line
LINE = 64_000_000  # maximum bytes of a csv file's other lines
DEPTH = 100  # maximum nesting of JSON; a normal row has 2
CHUNK = 1_000_000  # bytes read at once
UNPACKED = 100_000_000  # maximum bytes of a decompressed file,
TIMES = 1_000  # or this multiple of its compressed size; text has 3 to 20 times
MAGIC: dict[bytes, Any] = {b"\x1f\x8b": gzip, b"BZh": bz2, b"\xfd7zXZ\0": lzma}
"""{first bytes of a compressed file, as in `datasets`: module that opens it}."""
# Bytes of no token, so that not each of them begins a search; then a name and its colon (1: the
# name); another string, so that brackets in it do not count, up to its closing quote (2) or the
# chunk's end; an opening bracket (3); a closing one (4); or the chunk's end. Possessive quantifiers
# read each byte once; a string without an end is one match too.
TOKENS = re.compile(
    rb'[^"\[{\]}]*+(?:("(?:[^"\\]++|\\.)*+")\s*+:|"(?:[^"\\]++|\\.)*+("?)|([\[{])|([\]}])|\Z)',
    re.DOTALL,
)
STRING_END = re.compile(rb'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
QUOTED_END = re.compile(rb'(?:[^"]++|"")*+("?)')


@contextmanager
def open_unpacked(file: Path) -> Iterator[BinaryIO]:
    """Open a data set's file for reading bytes, decompressed if it is compressed with gzip, bzip2
    or xz. Raises DataError for a damaged file.
    """
    with reading(file, error=DataError):
        with file.open("rb") as plain:
            start = plain.read(max(map(len, MAGIC)))
        opener = next((MAGIC[magic] for magic in MAGIC if start.startswith(magic)), None)
        with file.open("rb") if opener is None else opener.open(file, "rb") as content:
            yield cast(BinaryIO, content)


def _check_unpacked(size: int, file: Path) -> None:
    """Raise DataError where `size` decompressed bytes of a data file exceed the limit."""
    limit = max(UNPACKED, TIMES * file.stat().st_size)
    if size > limit:
        raise DataError(
            f"it unpacks to more than {limit:,} bytes",
            where=str(file),
            accepted=f"{UNPACKED:,} bytes, or {TIMES:,} times the file's size",
            fix="Check that it is the right file; if so, unpack it.",
        )


def check_depth(file: Path) -> None:
    """Raise DataError for JSON that is nested more than DEPTH levels deep, on which recursive
    readers can crash, or with more than COLUMNS different names, which take minutes to read."""
    enclosing: list[int] = []  # name that each open bracket belongs to
    current = 0  # name that the next value belongs to, as a hash of its path
    names: set[int] = set()
    for token, line in _json_tokens(file):
        if token.group(1):
            current = hash((enclosing[-1] if enclosing else 0, token.group(1)))
            names.add(current)
        elif token.group(3):
            enclosing.append(current)
        elif token.group(4) and enclosing:
            current = enclosing.pop()
        if len(enclosing) > DEPTH:
            raise DataError(
                f"it is nested more than {DEPTH} levels deep",
                where=f"{file}:{_line(token, line)}",
                fix="Flatten it: only texts, labels and scores are read, one per column.",
            )
        if len(names) > COLUMNS:
            raise DataError(
                f"it has more than {COLUMNS:,} columns",
                where=f"{file}:{_line(token, line)}",
                accepted=f"{COLUMNS:,} or fewer, nested names included",
                fix="Remove the columns that are neither texts nor labels.",
            )


def _line(token: re.Match[bytes], first: int) -> int:
    return first + token.string.count(b"\n", 0, token.start(token.lastindex or 0))


def _json_tokens(file: Path) -> Iterator[tuple[re.Match[bytes], int]]:
    """Yield (match of TOKENS, number of the first line of its chunk) for each key and bracket
    outside strings."""
    size, line, remainder, in_string = 0, 1, b"", False
    with open_unpacked(file) as content:
        while chunk := content.read(CHUNK):
            size += len(chunk)
            _check_unpacked(size, file)
            chunk, remainder, start = remainder + chunk, b"", 0
            if in_string:
                end = cast(re.Match[bytes], STRING_END.match(chunk))
                in_string, start = not end.group(1), end.end()
                remainder = chunk[start:] if in_string else b""  # the first half of an escape
            for token in () if in_string else TOKENS.finditer(chunk, start):
                if token.group(2) == b"":
                    in_string, remainder = True, chunk[token.end() :]
                    break
                if token.group(2) is None:
                    yield token, line
            line += chunk.count(b"\n", 0, len(chunk) - len(remainder))


def check_columns(file: Path, separator: bytes = b",") -> None:
    """Raise DataError for a csv file with more than COLUMNS columns in its first line or fields in
    a row, or a line of more than LINE bytes."""
    field = re.compile(
        rb'(?:"(?:[^"]++|"")*+("?))?[^S\r\n]*+([S\r\n]?)'.replace(b"S", re.escape(separator))
    )
    fields, quoted = 0, False  # separators of the row so far; True inside quotes
    for number, line in _csv_lines(file, separator):
        start = 0
        if quoted:
            end = cast(re.Match[bytes], QUOTED_END.match(line))
            quoted, start = not end.group(1), end.end()
        elif b'"' not in line and line.count(separator) < COLUMNS:
            continue
        for match in () if quoted else field.finditer(line, start):
            quoted = match.group(1) == b""
            fields = fields + 1 if match.group(2) == separator else fields
            fields = 0 if match.group(2) in (b"\r", b"\n") else fields
            _check_fields(fields + 1, "fields", f"{file}:{number}")
            if quoted:
                break


def _csv_lines(file: Path, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line), leaving out chunks whose lines have no quote and few
    separators."""
    size, number = 0, 1
    with open_unpacked(file) as content:
        _check_fields(content.readline(HEADER).count(separator) + 1, "columns", f"{file}:1")
        content.seek(0)
        while chunk := content.read(CHUNK):
            end = content.readline(LINE)
            size += len(chunk) + len(end)
            _check_unpacked(size, file)
            if b"\0" in chunk or b"\0" in end:  # readers end a field there
                before = (chunk + end).partition(b"\0")[0].count(b"\n")
                raise DataError(
                    "a NUL byte was found",
                    where=f"{file}:{number + before}",
                    accepted="text in UTF-8",
                    fix="Save it as UTF-8, without NUL bytes.",
                )
            if len(end) == LINE:
                raise DataError(
                    "a line is too long",
                    where=f"{file}, after line {number}",
                    accepted=f"fewer than {LINE:,} bytes",
                )
            chunk += end
            if b'"' in chunk or chunk.count(separator) >= COLUMNS:
                yield from enumerate(chunk.splitlines(keepends=True), number)
            number += chunk.count(b"\n")


def _check_fields(count: int, what: str, where: str) -> None:
    if count > COLUMNS:
        raise DataError(
            f"it has {count:,} {what}",
            where=where,
            accepted=f"{COLUMNS:,} or fewer",
            fix="Remove the columns that are neither texts nor labels.",
        )


def check_parquet(file: Path, columns: Sequence[str] | None = None) -> None:
    """Raise DataError for a Parquet file with more than COLUMNS columns, too many rows, or too many
    bytes in `columns` (None: all)."""
    with reading(file, error=DataError):
        for size in parquet_file.measure_sizes(file, columns, COLUMNS):
            _check_unpacked(size, file)


CHECKS: dict[str, Callable[[Path], None]] = {
    "json": check_depth,
    "csv": check_columns,
    "parquet": check_parquet,
}
"""{format: check of a file}."""
