"""Tests of artifacts/: bundles are complete, also after parallel and killed runs."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from optimizer.foundation import atomic
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.publish.folder import publish, publish_failed
from tests import killing

FILES = ("manifest.json", "model/model.onnx", "report.html")


def bundle(folder: Path, tag: str, tar: bool = True) -> Path:
    """Make a bundle (and its tar) whose files all hold its name."""
    for name in FILES:
        file = folder / "bundle" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"of": tag}))
    if tar:
        (folder / "tiny-1.tar").write_text(json.dumps({"of": tag}))
    return folder / "bundle"


def tag_of(final: Path) -> str:
    """Return the name in the bundle's files; fail if they differ."""
    assert {str(p.relative_to(final)) for p in final.rglob("*") if p.is_file()} == set(FILES)
    (tag,) = {json.loads((final / name).read_text())["of"] for name in FILES}
    return str(tag)


def names(artifacts: Path) -> list[str]:
    return sorted(p.name for p in (artifacts / "tiny").iterdir())


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def exchanges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Return True if the system can exchange two names atomically."""
    if not request.param:
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    return request.param


def test_a_bundle_that_is_there_already_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = bundle(tmp_path / "new", "new")
    file = publish(new, tmp_path, "tiny", "1") / "manifest.json"
    before = file.stat().st_ino
    assert publish(new, tmp_path, "tiny", "1") == file.parent
    assert file.stat().st_ino == before
    assert "holds this bundle already" in capsys.readouterr().err


@pytest.mark.parametrize("harm", ["changed", "missing", "more", "link"])
def test_a_damaged_bundle_is_replaced(tmp_path: Path, harm: str) -> None:
    new = bundle(tmp_path / "new", "new")
    model = publish(new, tmp_path, "tiny", "1") / "model/model.onnx"
    if harm == "changed":
        model.write_text("x" * model.stat().st_size)
    elif harm == "more":
        (model.parent / "more").write_text("x")
    else:
        model.unlink()
        if harm == "link":
            model.symlink_to(new / "model/model.onnx")
    publish(new, tmp_path, "tiny", "1")
    assert tag_of(tmp_path / "tiny/1") == "new"
    assert not model.is_symlink()


def test_another_bundle_is_replaced_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], exchanges: bool
) -> None:
    for tag in ("old", "new"):
        final = publish(bundle(tmp_path / tag, tag), tmp_path, "tiny", "1")
    assert tag_of(final) == "new"
    assert f"{final} is replaced" in capsys.readouterr().err
    assert names(tmp_path) == ["1", "tiny-1.tar"]


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_killed_at_any_call_a_whole_bundle_has_the_name_and_the_next_run_completes_it(
    tmp_path: Path, exchanges: bool, every: int
) -> None:
    old, new = bundle(tmp_path / "old", "old"), bundle(tmp_path / "new", "new")
    final, tar = tmp_path / "tiny/1", tmp_path / "tiny/tiny-1.tar"
    kills, nameless = 0, 0
    for n in count(step=every):
        publish(old, tmp_path, "tiny", "1")
        code = killing.wait(killing.start(lambda: publish(new, tmp_path, "tiny", "1"), n))
        if code == 0:
            break
        kills += code == -9
        if final.exists():
            assert tag_of(final) in ("old", "new")
        else:
            nameless += 1
        assert json.loads(tar.read_text())["of"] in ("old", "new")
        publish(new, tmp_path, "tiny", "1")
        assert tag_of(final) == "new"
        assert names(tmp_path) == ["1", "tiny-1.tar"]
    assert kills * every == n > 30
    assert nameless <= kills * (not exchanges)
    assert nameless or exchanges or every > 1  # it is so between two calls only


def test_of_many_at_once_all_succeed_and_the_name_is_never_without_a_whole_bundle(
    tmp_path: Path,
) -> None:
    bundles = [bundle(tmp_path / tag, tag) for tag in ("a", "b", "b")]
    final = publish(bundle(tmp_path / "old", "old"), tmp_path, "tiny", "1")
    for _ in range(10):
        children = [
            killing.start(lambda: publish(each, tmp_path, "tiny", "1"))  # noqa: B023
            for each in bundles
        ]
        while children:
            assert (final / "manifest.json").is_file()
            done, status = os.waitpid(-1, os.WNOHANG)
            if done:
                children.remove(done)
                assert status == 0
        assert tag_of(final) in ("a", "b")
        assert names(tmp_path) == ["1", "tiny-1.tar"]


def test_a_version_that_somebody_else_publishes_is_waited_for(tmp_path: Path) -> None:
    new, log = bundle(tmp_path / "new", "new"), tmp_path / "log"

    def work() -> None:
        sys.stderr = log.open("w")
        publish(new, tmp_path, "tiny", "1")

    log.touch()
    with atomic.lock(tmp_path / ".tiny-1.lock"):
        child = killing.start(work)
        deadline = time.monotonic() + 20
        while "waiting for another run" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "waiting for another run" in log.read_text()
        assert not (tmp_path / "tiny" / "1").exists()
    assert killing.wait(child) == 0
    assert tag_of(tmp_path / "tiny/1") == "new"


def test_something_else_where_the_lock_goes_is_said(tmp_path: Path) -> None:
    (tmp_path / ".tiny-1.lock").mkdir()
    with pytest.raises(MachineError, match=r"tiny-1.lock: a folder stands where a lock file goes"):
        publish(bundle(tmp_path / "new", "new"), tmp_path, "tiny", "1")


REPORT = {"report.html": "<p>", "report.json": "[]"}


def test_the_report_of_a_failed_run_replaces_the_last_one(tmp_path: Path, exchanges: bool) -> None:
    publish_failed({**REPORT, "report.json": "[1]"}, tmp_path, "tiny", "1")
    file = publish_failed(REPORT, tmp_path, "tiny", "1")
    assert file == tmp_path / "tiny/1.failed/report.html"
    assert (file.parent / "report.json").read_text() == "[]"
    assert names(tmp_path) == ["1.failed"]


def test_the_report_of_a_failed_run_leaves_the_bundle_of_the_version(tmp_path: Path) -> None:
    final = publish(bundle(tmp_path / "new", "new"), tmp_path, "tiny", "1")
    publish_failed(REPORT, tmp_path, "tiny", "1")
    assert tag_of(final) == "new"


def test_a_folder_of_the_users_with_the_reports_name_is_kept(tmp_path: Path) -> None:
    own = tmp_path / "tiny/1.failed/my_notes.txt"
    own.parent.mkdir(parents=True)
    own.write_text("x")
    with pytest.raises(RecipeError, match="not the report of a failed run"):
        publish_failed(REPORT, tmp_path, "tiny", "1")
    publish(bundle(tmp_path / "new", "new"), tmp_path, "tiny", "1")
    assert own.read_text() == "x"


def test_a_full_disk_leaves_no_half_of_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "no")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match="--artifacts"):
        publish_failed(REPORT, tmp_path, "tiny", "1")
    assert names(tmp_path) == []
