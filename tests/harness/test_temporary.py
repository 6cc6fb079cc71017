"""Temporary folders: private, gone at the end, and after a kill gone with the next run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from optimizer.harness.errors import MachineError
from optimizer.harness.file_lock import try_lock
from optimizer.harness.temporary import FILES, OWNER, private_folder, temporary_folder

SLEEPER = """
import sys, time
from pathlib import Path
from optimizer.harness.temporary import private_folder
with private_folder(Path(sys.argv[1]), "optimize-test-") as folder:
    (folder / "big").write_text("x")
    print(folder, flush=True)
    time.sleep(60)
"""


@contextmanager
def maker(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and the folder it has."""
    command = [sys.executable, "-c", SLEEPER, str(parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def make_one(parent: Path) -> None:
    with private_folder(parent, "optimize-test-"):
        pass


def test_it_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    with private_folder(tmp_path, "optimize-test-") as folder:
        (folder / "sub").mkdir()
        assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_it_is_gone_after_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError), private_folder(tmp_path, "optimize-test-"):
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_what_is_moved_out_of_it_stays(tmp_path: Path) -> None:
    with private_folder(tmp_path, ".optimize-test-") as folder:
        (folder / "kept").mkdir()
        os.rename(folder / "kept", tmp_path / "kept")
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_that_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    with maker(tmp_path) as (living, kept), maker(tmp_path) as (killed, abandoned):
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert (abandoned / "big").exists()
        make_one(tmp_path)
        assert not abandoned.parent.exists()
        assert living.poll() is None
        assert (kept / "big").exists()


def abandoned(parent: Path, name: str, owner: bytes) -> Path:
    (parent / name / FILES).mkdir(parents=True)
    (parent / name / OWNER).write_bytes(owner)
    return parent / name


def own_owner(tmp_path: Path) -> bytes:
    with private_folder(tmp_path, "optimize-test-") as folder:
        return (folder.parent / OWNER).read_bytes()


def test_only_what_is_certainly_abandoned_is_removed(tmp_path: Path) -> None:
    here = own_owner(tmp_path)
    abandoned(tmp_path, "optimize-a", here)
    others = [
        abandoned(tmp_path, "optimize-b", b"another machine\n"),
        abandoned(tmp_path, "optimize-c", b""),  # being made at this instant
        abandoned(tmp_path, "notes", here),
        abandoned(tmp_path / "elsewhere", "optimize-d", here),
        tmp_path / "optimize-e",
        tmp_path / "optimize-f",
        tmp_path / "optimize-g",
    ]
    (tmp_path / "optimize-e").symlink_to(tmp_path / "elsewhere" / "optimize-d")
    (tmp_path / "optimize-f").mkdir()  # of another program
    (tmp_path / "optimize-g").mkdir()
    (tmp_path / "optimize-g" / OWNER).symlink_to(tmp_path / "elsewhere" / "optimize-d" / OWNER)
    make_one(tmp_path)
    assert not (tmp_path / "optimize-a").exists()
    assert all(os.path.lexists(p) for p in others)


@pytest.mark.skipif(os.name == "nt" or os.getuid() != 0, reason="gives a file to another user")
def test_that_of_another_user_stays(tmp_path: Path) -> None:
    theirs = abandoned(tmp_path, "optimize-a", own_owner(tmp_path))
    os.chown(theirs, 12345, 12345)
    make_one(tmp_path)
    assert theirs.exists()


def test_one_whose_files_another_process_of_its_maker_uses_stays(tmp_path: Path) -> None:
    folder = abandoned(tmp_path, "optimize-a", own_owner(tmp_path))
    with (folder / OWNER).open("r+b") as owner:
        assert try_lock(owner)
        make_one(tmp_path)
        assert folder.exists()
    make_one(tmp_path)
    assert not folder.exists()


def test_no_place_for_temporary_files_is_the_machines_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    refused = pytest.raises(MachineError, match=r"/proc/none.*temporary files.*TMPDIR")
    with refused, temporary_folder("test"):
        pass
