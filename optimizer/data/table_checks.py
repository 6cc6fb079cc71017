"""Data files looked at before their libraries read them, which some of them would not survive: JSON
that is deep or has many names, csv of endless lines, small files that hold much.
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

COLUMNS = 1_000  # of a table; four are read at most
HEADER = 1_000_000  # bytes of a csv file's first line
LINE = 64_000_000  # bytes of a csv file's other lines
DEPTH = 100  # of JSON; a row here has 2
CHUNK = 1_000_000  # bytes of JSON in a chunk
UNFOLDED = 100_000_000  # bytes of a compressed file, unfolded,
TIMES = 1_000  # or this multiple of its size; text unfolds to 3 to 20 times
FOLDED: dict[bytes, Any] = {b"\x1f\x8b": gzip, b"BZh": bz2, b"\xfd7zXZ\0": lzma}
"""By the first bytes, as `datasets` tells them: the module that opens such a file."""
# A name and its colon (1: the name); another string whole, so that brackets in it do not count, or
# up to the chunk's end (2: what closes it); an opening bracket (3); a closing one (4). Each byte is
# read once: no part gives back what it took, and a string without an end is one match, too.
TOKENS = re.compile(
    rb'("(?:[^"\\]++|\\.)*+")\s*+:|"(?:[^"\\]++|\\.)*+("?)|([\[{])|([\]}])', re.DOTALL
)
STRING_END = re.compile(rb'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
QUOTED_END = re.compile(rb'(?:[^"]++|"")*+("?)')


@contextmanager
def _unfolded(file: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed where it is compressed with gzip, bzip2 or xz.

    Raises DataError for one whose compressed bytes are damaged.
    """
    with reading(file, error=DataError):
        with file.open("rb") as plain:
            start = plain.read(max(map(len, FOLDED)))
        opener = next((FOLDED[magic] for magic in FOLDED if start.startswith(magic)), None)
        with file.open("rb") if opener is None else opener.open(file, "rb") as content:
            yield cast(BinaryIO, content)


def _check_unfolded(size: int, file: Path) -> None:
    """Raise DataError where `size` bytes are more than a file may unfold to."""
    limit = max(UNFOLDED, TIMES * file.stat().st_size)
    if size > limit:
        raise DataError(
            f"it unfolds to more than {limit:,} bytes",
            where=str(file),
            accepted=f"{UNFOLDED:,} bytes, or {TIMES:,} times the file's size",
            fix="Is it the file you mean? If so, give it unpacked.",
        )


def check_depth(file: Path) -> None:
    """Raise DataError for JSON that is nested more than DEPTH levels deep, whose readers recurse,
    one until the process ends; or that has more than COLUMNS names, each a column or a part of one,
    which they read for minutes."""
    enclosing: list[int] = []  # of each open bracket, what it is the value of
    current = 0  # the name that a value would belong to, as the hash of all names on the way to it
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
                fix="One text, label or score per column is read; leave the others out.",
            )
        if len(names) > COLUMNS:
            raise DataError(
                f"it has more than {COLUMNS:,} columns",
                where=f"{file}:{_line(token, line)}",
                accepted=f"{COLUMNS:,} or fewer, the names inside of others included",
                fix="Leave out the columns that hold neither texts nor labels.",
            )


def _line(token: re.Match[bytes], first: int) -> int:
    return first + token.string.count(b"\n", 0, token.start())


def _json_tokens(file: Path) -> Iterator[tuple[re.Match[bytes], int]]:
    """Each name and bracket outside of strings, with the line that its chunk begins in."""
    size, line, rest, in_string = 0, 1, b"", False
    with _unfolded(file) as content:
        while chunk := content.read(CHUNK):
            size += len(chunk)
            _check_unfolded(size, file)
            chunk, rest, start = rest + chunk, b"", 0
            if in_string:
                end = cast(re.Match[bytes], STRING_END.match(chunk))
                in_string, start = not end.group(1), end.end()
                rest = chunk[start:] if in_string else b""  # of an escape, its first half
            for token in () if in_string else TOKENS.finditer(chunk, start):
                if token.group(2) == b"":
                    in_string, rest = True, chunk[token.end() :]
                    break
                if token.group(2) is None:
                    yield token, line
            line += chunk.count(b"\n", 0, len(chunk) - len(rest))


def check_columns(file: Path, separator: bytes = b",") -> None:
    """Raise DataError for a csv file of more than COLUMNS columns, by its first line, or cells in
    a row; and for a line of more than LINE bytes."""
    cell = re.compile(
        rb'(?:"(?:[^"]++|"")*+("?))?[^S\r\n]*+([S\r\n]?)'.replace(b"S", re.escape(separator))
    )
    cells, quoted = 0, False  # separators of the row so far; whether a quote is open
    for number, line in _csv_lines(file, separator):
        start = 0
        if quoted:
            end = cast(re.Match[bytes], QUOTED_END.match(line))
            quoted, start = not end.group(1), end.end()
        elif b'"' not in line and line.count(separator) < COLUMNS:
            continue
        for match in () if quoted else cell.finditer(line, start):
            quoted = match.group(1) == b""
            cells = cells + 1 if match.group(2) == separator else cells
            cells = 0 if match.group(2) in (b"\r", b"\n") else cells
            _check_cells(cells + 1, "cells", f"{file}:{number}")
            if quoted:
                break


def _csv_lines(file: Path, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """The lines and their numbers, without those between which no quote and few separators are."""
    size, number = 0, 1
    with _unfolded(file) as content:
        _check_cells(content.readline(HEADER).count(separator) + 1, "columns", f"{file}:1")
        content.seek(0)
        while chunk := content.read(CHUNK):
            end = content.readline(LINE)
            size += len(chunk) + len(end)
            _check_unfolded(size, file)
            if b"\0" in chunk or b"\0" in end:  # where a reader ends a cell
                before = (chunk + end).partition(b"\0")[0].count(b"\n")
                raise DataError(
                    "a NUL was found",
                    where=f"{file}:{number + before}",
                    accepted="text in UTF-8",
                    fix="Save it as UTF-8, without NULs.",
                )
            if len(end) == LINE:
                raise DataError(
                    "a line is too long",
                    where=f"{file}, after line {number}",
                    accepted=f"less than {LINE:,} bytes",
                )
            chunk += end
            if b'"' in chunk or chunk.count(separator) >= COLUMNS:
                yield from enumerate(chunk.splitlines(keepends=True), number)
            number += chunk.count(b"\n")


def _check_cells(count: int, what: str, where: str) -> None:
    if count > COLUMNS:
        raise DataError(
            f"it has {count:,} {what}",
            where=where,
            accepted=f"{COLUMNS:,} or fewer",
            fix="Leave out the columns that hold neither texts nor labels.",
        )


def check_parquet(file: Path, columns: Sequence[str] | None = None) -> None:
    """Raise DataError for a Parquet file of more than COLUMNS columns, of too many rows, or whose
    columns of these names (None: all) unfold to too many bytes."""
    with reading(file, error=DataError):
        for size in parquet_file.sizes(file, columns, COLUMNS):
            _check_unfolded(size, file)


CHECKS: dict[str, Callable[[Path], None]] = {
    "json": check_depth,
    "csv": check_columns,
    "parquet": check_parquet,
}
"""By format: what its library would not survive."""
