r"""Bytes to lines of text: one line, one text, whatever else ends lines elsewhere.

Only "\n" ends a line, and a "\r" before it belongs to it: U+2028, U+0085, form feeds and the rest
of what str.splitlines cuts at are characters of a text. An empty line is a text too, the end of
the last line starts none, and a byte order mark before the first is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..bounds import LINE
from ..errors import InputError
from ..trust.plain_file import open_regular

LONGEST = f"lines of up to {LINE:,} bytes"
READ = 1 << 20  # bytes asked for at once; a pipe gives what it has
MARK = b"\xef\xbb\xbf"


class Source(Protocol):
    """What bytes are read from: read1 returns some as soon as there are any, b"" at the end."""

    def read1(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Line:
    """number: from 1."""

    number: int
    text: str


def windows(source: Source, most: int) -> Iterator[list[Line]]:
    """Lists of at most `most` lines, in order, each as soon as its lines are there.

    Nothing waits for a full window: what one read gave is passed on, so whoever writes line by
    line is answered line by line. Raises InputError naming the line that is not UTF-8, after the
    lines before it were given out.
    """
    number, begun, waiting = 1, [b""], 0
    while True:
        data = source.read1(READ)
        begun.append(data)
        waiting += len(data)
        if data and b"\n" not in data:
            if waiting > LINE:
                raise InputError(
                    f"{waiting:,} bytes and no end", where=f"line {number}", accepted=LONGEST
                )
            continue
        *whole, rest = b"".join(begun).split(b"\n")
        begun, waiting = [rest], len(rest)
        if not data and rest:
            whole.append(rest)
        for start in range(0, len(whole), most):
            yield from _decoded(whole[start : start + most], number + start)
        number += len(whole)
        if not data:
            return


def texts_of(path: Path) -> list[str]:
    """The lines of a file. Raises InputError when it cannot be read or is not UTF-8."""
    with open_regular(path) as source:
        try:
            return [line.text for window in windows(source, READ) for line in window]
        except OSError as e:
            raise InputError(f"cannot be read ({e})", where=str(path)) from None
        except InputError as e:
            e.where = f"{path}: {e.where}"
            raise


def _decoded(raw: Sequence[bytes], number: int) -> Iterator[list[Line]]:
    """The lines as one list; at one that is not UTF-8 those before it, then the error."""
    lines: list[Line] = []
    for i, line in enumerate(raw, number):
        line = line.removeprefix(MARK) if i == 1 else line
        try:
            lines.append(Line(i, line.removesuffix(b"\r").decode()))
        except UnicodeDecodeError as e:
            if lines:
                yield lines
            raise InputError(
                f"byte {e.start + 1} (0x{line[e.start]:02x}) is not UTF-8",
                where=f"line {i}",
                accepted="UTF-8, one text per line",
                fix="Convert it: iconv -f LATIN1 -t UTF-8, with the encoding it has.",
            ) from None
    yield lines
