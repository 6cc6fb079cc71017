r"""Split a stream of bytes into lines of text, one text per line.

Only "\n" and "\r\n" end a line; U+2028, U+0085, form feeds and the other separators of
str.splitlines are characters of a text. An empty line is an empty text, a newline at the end of
the stream starts no new line, and a leading byte order mark is dropped.
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
READ = 1 << 20  # maximum bytes per read; a pipe returns what is available
MARK = b"\xef\xbb\xbf"


class ByteStream(Protocol):
    """Binary stream of input lines, whose read1 returns available bytes at once, and b"" at the
    end."""

    def read1(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class InputLine:
    """One line of text inputs, from a command's standard input. number: line number, starting at
    1."""

    number: int
    text: str


def read_windows(source: ByteStream, most: int) -> Iterator[list[InputLine]]:
    """Yield lists of input lines in order, each as soon as its lines have been read.

    most: maximum lines per list. Lists are not filled up: the lines of one read are passed on, so
        that a client that writes line by line gets answers line by line.
    Raises InputError for a line that is not UTF-8, after yielding the lines before it.
    """
    number, begun, waiting = 1, [b""], 0
    while True:
        data = source.read1(READ)
        begun.append(data)
        waiting += len(data)
        if data and b"\n" not in data:
            if waiting > LINE:
                raise InputError(
                    f"the line has {waiting:,} bytes so far",
                    where=f"line {number}",
                    accepted=LONGEST,
                )
            continue
        *whole, rest = b"".join(begun).split(b"\n")
        begun, waiting = [rest], len(rest)
        if not data and rest:
            whole.append(rest)
        for start in range(0, len(whole), most):
            yield from _decode(whole[start : start + most], number + start)
        number += len(whole)
        if not data:
            return


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file, one input each. Raises InputError if it cannot be read or is not
    UTF-8."""
    with open_regular(path) as source:
        try:
            return [line.text for window in read_windows(source, READ) for line in window]
        except OSError as e:
            raise InputError(f"cannot be read ({e})", where=str(path)) from None
        except InputError as e:
            e.where = f"{path}: {e.where}"
            raise


def _decode(raw: Sequence[bytes], number: int) -> Iterator[list[InputLine]]:
    """Yield the input lines as one list; if a line is not UTF-8, the lines before it, then
    raise."""
    lines: list[InputLine] = []
    for i, line in enumerate(raw, number):
        line = line.removeprefix(MARK) if i == 1 else line
        try:
            lines.append(InputLine(i, line.removesuffix(b"\r").decode()))
        except UnicodeDecodeError as e:
            if lines:
                yield lines
            raise InputError(
                f"byte {e.start + 1} (0x{line[e.start]:02x}) is not UTF-8",
                where=f"line {i}",
                accepted="UTF-8, one text per line",
                fix="Convert the file, e.g. iconv -f LATIN1 -t UTF-8.",
            ) from None
    yield lines
