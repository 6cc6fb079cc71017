"""A number that no machine can mean is refused with the option and its bound."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from optimizer.harness.__main__ import main
from optimizer.harness.bounds import LINE, TEXT
from optimizer.harness.errors import InputError
from optimizer.harness.inputs.lines import read_lines, read_windows
from tests.package.bundles import small_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only."""
    return small_bundle.make(tmp_path_factory.mktemp("bounds")) / "bundle"


@pytest.mark.parametrize(
    ("command", "option", "value", "accepted"),
    [
        ("predict", "--threads", "100000", "from 0 to 1,024"),
        ("predict", "--threads", "-1", "from 0 to 1,024"),
        ("predict", "--threads", "²", "from 0 to 1,024"),
        ("predict", "--batch-size", "0", "from 1 to 4,096"),
        ("bench", "--batch", "100000000", "from 1 to 4,096"),
        ("bench", "--sequence", "9" * 5000, "from 1 to 1,048,576"),
        ("bench", "--iterations", "1e3", "from 1 to 100,000"),
    ],
)
def test_an_option_out_of_bounds_is_named_with_them(
    command: str,
    option: str,
    value: str,
    accepted: str,
    bundle: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([command, "--bundle", str(bundle), option, value]) == 2
    err = capsys.readouterr().err
    assert f"argument {option}" in err
    assert accepted in err


def test_a_batch_of_too_many_tokens_is_refused(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--batch", "4096", "--sequence", "1024"]
    assert main(["bench", "--bundle", str(bundle), *grid]) == 2
    assert "up to 1,048,576 tokens in a batch" in capsys.readouterr().err


def test_a_text_too_long_to_tokenize_is_cut_like_any_long_text(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = io.TextIOWrapper(io.BytesIO(b"good\n" + b"bad " * (TEXT // 4 + 1) + b"\nfilm\n"))
    monkeypatch.setattr("sys.stdin", data)
    assert main(["predict", "--bundle", str(bundle)]) == 0
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 3
    assert "line 2" in output.err


class Endless:
    def read1(self, size: int, /) -> bytes:
        return b"x" * 65536


def test_a_line_without_an_end_is_refused_before_memory_is_full() -> None:
    with pytest.raises(InputError, match=f"line 1: the line has .* bytes so far.*{LINE:,} bytes"):
        list(read_windows(Endless(), 10))


@pytest.mark.parametrize("name", ["missing", "folder", "a\0b"])
def test_texts_that_are_no_plain_file_are_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"not a regular file|cannot be read"):
        read_lines(tmp_path / name)


@pytest.mark.parametrize("path", ["missing", "x" * 5000, "a\0b"])
def test_a_bundle_that_is_not_there_is_exit_2(path: str, tmp_path: Path) -> None:
    assert main(["check", "--bundle", str(tmp_path / path)]) == 2
