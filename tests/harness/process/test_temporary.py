"""Temporary folders: private, gone at the end, and after a kill gone with the next run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from optimizer.harness.errors import MachineError
from optimizer.harness.process.temporary import make_private_folder, make_temporary_folder
from tests import killing

SLEEPER = """
import sys, time
from pathlib import Path
from optimizer.harness.process.temporary import make_private_folder
with make_private_folder(Path(sys.argv[1]), "optimize-test") as folder:
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
    with make_private_folder(parent, "optimize-test"):
        pass


def test_it_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    with make_private_folder(tmp_path, "optimize-test") as folder:
        (folder / "sub").mkdir()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_it_is_gone_after_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError), make_private_folder(tmp_path, "optimize-test"):
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_what_is_moved_out_of_it_stays(tmp_path: Path) -> None:
    with make_private_folder(tmp_path, ".optimize-test") as folder:
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
        assert not abandoned.exists()
        assert living.poll() is None
        assert (kept / "big").exists()


def text_of_owner(tmp_path: Path) -> bytes:
    with make_private_folder(tmp_path, "optimize-test") as folder:
        return folder.with_name(f"{folder.name}.owner").read_bytes()


def abandoned(parent: Path, kind: str, owner: bytes) -> Path:
    folder = parent / f"{kind}-0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "big").write_text("x")
    folder.with_name(f"{folder.name}.owner").write_bytes(owner)
    return folder


def test_only_what_is_certainly_abandoned_is_removed(tmp_path: Path) -> None:
    here = text_of_owner(tmp_path)
    gone = [abandoned(tmp_path, "optimize-a", here), abandoned(tmp_path, ".optimize-b", here)]
    outside = abandoned(tmp_path / "elsewhere", "optimize-c", here)
    kept = [
        abandoned(tmp_path, "optimize-d", b"another machine\n"),
        abandoned(tmp_path, "optimize-Notes", here),
        tmp_path / "optimize-e-0123456789abcdef",  # a folder without an owner
        tmp_path / "optimize-f-0123456789abcdef",  # a link with an owner
        tmp_path / "optimize-g-0123456789abcdef",  # a folder whose owner is a link
        outside,
    ]
    kept[2].mkdir()
    kept[3].symlink_to(outside)
    kept[3].with_name(f"{kept[3].name}.owner").write_bytes(here)
    kept[4].mkdir()
    kept[4].with_name(f"{kept[4].name}.owner").symlink_to(f"{outside}.owner")
    make_one(tmp_path)
    assert not any(map(os.path.lexists, gone))
    assert all(map(os.path.lexists, kept))
    assert (outside / "big").exists()


@pytest.mark.skipif(os.name == "nt" or os.getuid() != 0, reason="gives a file to another user")
@pytest.mark.parametrize("theirs", ["", ".owner"])
def test_that_of_another_user_stays(tmp_path: Path, theirs: str) -> None:
    folder = abandoned(tmp_path, "optimize-a", text_of_owner(tmp_path))
    os.chown(f"{folder}{theirs}", 12345, 12345)
    make_one(tmp_path)
    assert (folder / "big").exists()


def test_killed_at_any_call_nothing_is_left_after_the_next(tmp_path: Path) -> None:
    for n in count():
        code = killing.wait(killing.start(lambda: make_one(tmp_path), n))
        make_one(tmp_path)
        assert list(tmp_path.iterdir()) == []
        if code == 0:
            break
    assert n > 5


def test_many_at_once_never_take_a_folder_from_each_other(tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(50):
            with make_private_folder(tmp_path, "optimize-test") as folder:
                (folder / "own").write_text("x")
                assert (folder / "own").exists()

    children = [killing.start(work) for _ in range(4)]
    assert [killing.wait(child) for child in children] == [0] * 4
    assert list(tmp_path.iterdir()) == []


def test_no_place_for_temporary_files_is_the_machines_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    refused = pytest.raises(MachineError, match=r"/proc/none.*temporary files.*TMPDIR")
    with refused, make_temporary_folder("test"):
        pass
