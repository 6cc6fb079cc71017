"""Secrets in files: which are read, which are warned of, and which are refused."""

import os
from pathlib import Path

import pytest

from optimizer.harness.commands.serve import LARGEST_TOKEN, read_token
from optimizer.harness.errors import InputError
from optimizer.harness.trust.plain_file import read_secret


def test_a_secret_is_read_and_whoever_else_may_read_it_is_said(tmp_path: Path) -> None:
    file, said = tmp_path / "token", list[str]()
    file.write_text(" sesame\n")
    for mode, warned in ((0o600, 0), (0o640, 1), (0o644, 1)):
        file.chmod(mode)
        said.clear()
        assert read_token(file, said.append) == "sesame"
        assert len(said) == warned


@pytest.mark.parametrize(
    "kind", ["missing", "fifo", "folder", "empty", "large", "binary", "shared"]
)
def test_what_is_no_secret_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    contents = {
        "empty": b" \n",
        "large": b"a" * (LARGEST_TOKEN + 1),
        "binary": b"\xff",
        "shared": b"a",
    }
    if kind == "fifo":
        os.mkfifo(file)  # nobody ever writes
    elif kind == "folder":
        file.mkdir()
    elif kind in contents:
        file.write_bytes(contents[kind])
        file.chmod(0o666 if kind == "shared" else 0o600)
    with pytest.raises(InputError) as e:
        read_token(file, lambda _: None)
    assert str(file) in str(e.value)


def test_the_file_that_is_read_is_the_one_whose_mode_is_looked_at(tmp_path: Path) -> None:
    file, said = tmp_path / "key", list[str]()

    def replaced(message: str) -> None:
        said.append(message)
        file.unlink()

    file.write_bytes(b"sesame")
    file.chmod(0o666)
    assert read_secret(file, replaced, shared=True) == b"sesame"
    assert "mode 0666" in said[0]
