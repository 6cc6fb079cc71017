"""Only "\\n" ends a line, and no line is lost."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.harness.errors import InputError
from optimizer.harness.inputs.lines import read_lines, read_windows

INSIDE = ["a\u2028b", "a\u0085b", "a\x0cb", "a\x0bb", "a\x1cb", "a\rb", "a\u2029b", "\x00", "", " "]


class Pipe:
    """Source that returns one part per read, like a pipe with a slow writer."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = list(parts)

    def read1(self, size: int, /) -> bytes:
        return self.parts.pop(0) if self.parts else b""


def texts(*parts: bytes, most: int = 3) -> list[str]:
    found = [line for window in read_windows(Pipe(*parts), most) for line in window]
    assert [line.number for line in found] == list(range(1, len(found) + 1))
    return [line.text for line in found]


def test_nothing_but_a_line_feed_ends_a_line() -> None:
    assert texts("\n".join(INSIDE).encode() + b"\n") == INSIDE


TEXT = st.text(st.characters(exclude_characters="\n\r\ufeff", codec="utf-8"))


@settings(max_examples=50)
@given(st.lists(TEXT), st.integers(1, 9))
def test_lines_joined_and_cut_anywhere_are_the_lines_again(lines: list[str], step: int) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    assert texts(*(data[i : i + step] for i in range(0, len(data), step))) == lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"\n\n", ["", ""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", ["a", "\ufeffb"]),
    ],
)
def test_the_ends_of_lines_and_of_the_input(data: bytes, lines: list[str]) -> None:
    assert texts(data) == lines


def test_a_line_is_given_out_before_the_next_is_written() -> None:
    pipe = Pipe(b"one\ntw", b"o\n", b"three")
    found = read_windows(pipe, 8)
    assert [line.text for line in next(found)] == ["one"]
    assert pipe.parts == [b"o\n", b"three"]
    assert [[line.text for line in w] for w in found] == [["two"], ["three"]]


def test_a_window_has_no_more_lines_than_asked_for() -> None:
    assert [len(w) for w in read_windows(Pipe(b"x\n" * 7), 3)] == [3, 3, 1]


@pytest.mark.parametrize("bad", [b"\xff", b"caf\xe9", b"\xed\xa0\x80", b"\xc3"])
def test_a_line_that_is_not_utf8_is_named_after_those_before_it(bad: bytes) -> None:
    found = read_windows(Pipe(b"a\nb\n" + bad + b"\nc\n"), 8)
    assert [line.text for line in next(found)] == ["a", "b"]
    with pytest.raises(InputError, match=r"line 3: byte .* is not UTF-8") as caught:
        next(found)
    assert caught.value.exit_code == 2


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.txt: cannot be read"):
        read_lines(tmp_path / "none.txt")
    (tmp_path / "bad.txt").write_bytes(b"a\n\xff")
    with pytest.raises(InputError, match=r"bad\.txt: line 2"):
        read_lines(tmp_path / "bad.txt")
