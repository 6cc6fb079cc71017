"""The laws at the top of store.py."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from optimizer.foundation.atomic import lock
from optimizer.foundation.errors import MachineError
from optimizer.recipe.schema import Package
from optimizer.store import MADE_FROM, Stage, Step, Stopped, Store, digest_json


def write_a(section: Package | None, *inputs: Path, out: Path) -> None:
    (out / "a.txt").write_text(f"{section.version if section else ''}{len(inputs)}")


COUNT = Stage("count", 1, write_a)


def test_a_finished_step_is_not_run_again(tmp_path: Path) -> None:
    runs = []

    def run(section: Package, out: Path) -> None:
        runs.append(section.version)
        (out / "x").write_text("x")

    for _ in range(2):
        Store(tmp_path).step(Stage("s", 1, run), Package())
    assert runs == ["1"]


@pytest.mark.parametrize(
    "other",
    [
        (Stage("count", 2, write_a), Package()),
        (COUNT, Package(version="2")),
        (Stage("count", 1, write_a, files=lambda _: {"data": "abc"}), Package()),
        (Stage("count", 1, write_a, packages=("numpy",)), Package()),
    ],
    ids=["stage version", "section", "files read", "packages"],
)
def test_the_key_changes_with_each_thing_it_is_made_of(
    tmp_path: Path, other: tuple[Stage, Package]
) -> None:
    store = Store(tmp_path)
    assert store.step(COUNT, Package()).key != store.step(*other).key


def test_the_key_changes_with_the_key_of_an_input(tmp_path: Path) -> None:
    store = Store(tmp_path)
    one, two = store.step(COUNT, Package()), store.step(COUNT, Package(version="2"))
    assert store.step(COUNT, None, one).key != store.step(COUNT, None, two).key


def test_made_from_lists_every_file_with_its_digest(tmp_path: Path) -> None:
    step = Store(tmp_path).step(COUNT, Package())
    made = json.loads((step.path / MADE_FROM).read_text())
    assert list(made["files"]) == ["a.txt"]
    assert made["files"]["a.txt"]["size"] == 2
    assert made["key"] == step.key
    assert "code" in made
    without = {k: v for k, v in made.items() if k not in ("key", "files", "recipe")}
    assert digest_json(without)[:32] == step.key


def test_a_stage_that_fails_leaves_no_finished_folder(tmp_path: Path) -> None:
    def run(section: Package, out: Path) -> None:
        (out / "half").write_text("half")
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        Store(tmp_path).step(Stage("s", 1, run), Package())
    assert not list(tmp_path.glob(f"s/*/{MADE_FROM}"))


def test_leftovers_of_a_failed_attempt_do_not_reach_the_result(tmp_path: Path) -> None:
    attempts = []

    def run(section: Package, out: Path) -> None:
        attempts.append(1)
        (out / f"file{len(attempts)}").write_text("x")
        if len(attempts) == 1:
            raise ValueError

    store = Store(tmp_path)
    with pytest.raises(ValueError):
        store.step(Stage("s", 1, run), Package())
    step = store.step(Stage("s", 1, run), Package())
    assert sorted(p.name for p in step.path.iterdir()) == ["file2", MADE_FROM]


def test_a_resumable_stage_finds_its_own_partial_work(tmp_path: Path) -> None:
    def run(section: Package, out: Path) -> None:
        if not (out / "progress").exists():
            (out / "progress").write_text("1")
            raise ValueError
        (out / "done").write_text((out / "progress").read_text())

    stage, store = Stage("s", 1, run, resumable=True), Store(tmp_path)
    with pytest.raises(ValueError):
        store.step(stage, Package())
    assert (store.step(stage, Package()).path / "done").read_text() == "1"


def test_a_resumable_stage_does_not_continue_in_a_finished_folder(tmp_path: Path) -> None:
    """A run that is killed right after it replaced a finished folder leaves that one."""
    found = []

    def run(section: Package, out: Path) -> None:
        found.extend(out.iterdir())
        (out / "done").touch()

    stage = Stage("s", 1, run, resumable=True)
    step = Store(tmp_path).step(stage, Package())
    shutil.copytree(step.path, step.path.with_suffix(".partial"))
    Store(tmp_path, again=frozenset({"s"})).step(stage, Package())
    assert found == []


def test_a_resumable_stage_does_not_continue_in_what_is_left_of_a_replaced_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def run(section: Package, out: Path) -> None:
        found.extend(out.iterdir())
        (out / "done").touch()

    def killed(folder: Path) -> None:
        (folder / MADE_FROM).unlink()
        raise KeyboardInterrupt

    stage, store = Stage("s", 1, run, resumable=True), Store(tmp_path, again=frozenset({"s"}))
    store.step(stage, Package())
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store.step(stage, Package())
    store.step(stage, Package())
    assert found == []


def test_a_folder_damaged_after_it_was_finished_is_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    step = store.step(COUNT, Package())
    (step.path / "a.txt").write_text("longer than before")
    assert (store.step(COUNT, Package()).path / "a.txt").read_text() == "10"


def test_a_changed_byte_of_the_same_length_is_damage_too(tmp_path: Path) -> None:
    step = Store(tmp_path).step(COUNT, Package())
    (step.path / "a.txt").write_text("20")
    assert (Store(tmp_path).step(COUNT, Package()).path / "a.txt").read_text() == "10"


def test_what_follows_a_measured_step_is_keyed_by_what_was_measured(tmp_path: Path) -> None:
    values = iter("ab")

    def measure(section: Package, out: Path) -> None:
        (out / "time").write_text(next(values))

    stage = Stage("measure", 1, measure, measured=True)
    first = Store(tmp_path).step(stage, Package())
    one = Store(tmp_path).step(COUNT, None, first)
    second = Store(tmp_path, again=frozenset({"measure"})).step(stage, Package())
    two = Store(tmp_path).step(COUNT, None, second)
    assert first.key == second.key
    assert one.key != two.key


def test_again_redoes_a_finished_step(tmp_path: Path) -> None:
    runs = []

    def run(section: Package, out: Path) -> None:
        runs.append(1)

    Store(tmp_path).step(Stage("s", 1, run), Package())
    Store(tmp_path, again=frozenset({"s"})).step(Stage("s", 1, run), Package())
    assert len(runs) == 2


def test_a_dry_store_writes_nothing(tmp_path: Path) -> None:
    step = Store(tmp_path, dry=True).step(COUNT, Package())
    assert not step.done
    assert not list(tmp_path.iterdir())


def slow_append(section: Package, out: Path) -> None:
    (out.parent.parent / "runs").open("a").write("x")
    time.sleep(0.5)


def step_in_process(root: Path) -> None:
    Store(root).step(Stage("s", 1, slow_append), Package())


def test_two_runs_on_one_store_compute_a_key_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=step_in_process, args=(tmp_path,)) for _ in range(2)]
    for p in both:
        p.start()
    for p in both:
        p.join()
    assert (tmp_path / "runs").read_text() == "x"


def test_a_killed_run_leaves_nothing_that_could_be_taken_for_done(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=step_in_process, args=(tmp_path,))
    process.start()
    while not (tmp_path / "runs").exists():
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not list(tmp_path.glob(f"s/*/{MADE_FROM}"))
    assert Store(tmp_path).step(Stage("s", 1, write_a), Package()).done


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOTDIR])
def test_a_disk_that_refuses_is_the_machines_fault_and_says_what_to_do(
    tmp_path: Path, number: int
) -> None:
    def run(section: Package, out: Path) -> None:
        raise OSError(number, os.strerror(number), str(out / "big"))

    with pytest.raises(MachineError, match=r"big: .*--store") as caught:
        Store(tmp_path).step(Stage("s", 1, run), Package())
    assert caught.value.exit_code == 5
    assert not list(tmp_path.glob(f"s/*/{MADE_FROM}"))


def test_a_place_where_no_folder_can_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"/proc/x.*no folder can be created.*--store"):
        Store(Path("/proc/x")).step(COUNT, Package())


def test_a_step_knows_whether_it_is_done(tmp_path: Path) -> None:
    assert not Step("s", "k", tmp_path / "nothing").done
    assert Store(tmp_path).step(COUNT, Package()).done


def test_no_step_is_begun_behind_the_stage_to_stop_after(tmp_path: Path) -> None:
    store = Store(tmp_path, until="count", stages=("before", "count", "after"))
    one = store.step(COUNT, Package())
    assert store.step(COUNT, None, one).done
    with pytest.raises(Stopped):
        store.step(Stage("after", 1, write_a), None, one)
    assert not (tmp_path / "after").exists()
    with pytest.raises(Stopped):  # also where no step of that stage was
        Store(tmp_path, until="before", stages=("before", "count", "after")).step(COUNT, None)


DAMAGE = {
    "empty": b"",
    "truncated": b'{"files": {"a.txt": {"si',
    "a list": b"[]",
    "no files": b"{}",
    "files is a list": b'{"files": []}',
    "not text": b"\xff\x00",
    "deep": b"[" * 100_000,
    "a folder": None,
}


def damage(step: Step, content: bytes | None) -> None:
    """content: bytes of made_from.json; None for a folder in its place."""
    (step.path / MADE_FROM).unlink()
    if content is None:
        (step.path / MADE_FROM).mkdir()
    else:
        (step.path / MADE_FROM).write_bytes(content)


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_list_of_files_has_the_step_made_again_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    step = Store(tmp_path).step(COUNT, Package())
    damage(step, content)
    assert not step.done
    assert Store(tmp_path).step(COUNT, Package()).done
    assert f"{step.path} was damaged" in capsys.readouterr().err
    Store(tmp_path).step(COUNT, Package())
    assert "count: reused" in capsys.readouterr().err


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE.keys())
def test_planning_takes_a_damaged_step_for_one_to_run(
    tmp_path: Path, content: bytes | None
) -> None:
    measured = Stage("measure", 1, write_a, measured=True)
    step = Store(tmp_path).step(measured, Package())
    damage(step, content)
    planned = Store(tmp_path, dry=True).step(measured, Package())
    assert (planned.done, planned.identity) == (False, step.key)


def replace_by_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x")


def replace_by_a_link(path: Path) -> None:
    (path / "a.txt").write_text("x")
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def replace_a_file_by_a_folder(path: Path) -> None:
    (path / "a.txt").unlink()
    (path / "a.txt").mkdir()


def remove_a_file(path: Path) -> None:
    (path / "a.txt").unlink()


@pytest.mark.parametrize(
    "harm", [replace_by_a_file, replace_by_a_link, replace_a_file_by_a_folder, remove_a_file]
)
def test_whatever_else_lies_where_a_finished_step_was_is_made_again(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    harm(Store(tmp_path).step(COUNT, Package()).path)
    step = Store(tmp_path).step(COUNT, Package())
    assert (step.path / "a.txt").read_text() == "10"
    assert not step.path.is_symlink()


@pytest.mark.parametrize("kind", ["a folder", "another file", "a link"])
def test_what_stands_where_a_lock_goes_is_named_and_kept(tmp_path: Path, kind: str) -> None:
    store = Store(tmp_path)
    place = store.step(COUNT, Package()).path.with_suffix(".lock")
    place.unlink()
    if kind == "a folder":
        place.mkdir()
    elif kind == "a link":
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.write_text("my notes")
    with pytest.raises(MachineError, match=f"{place.name}: {kind} stands where a lock") as caught:
        Store(tmp_path).step(COUNT, Package())
    assert caught.value.exit_code == 5
    assert kind != "another file" or place.read_text() == "my notes"


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_without_locks_of_the_kernel_one_that_a_killed_run_left_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def missing(fd: int, operation: int) -> None:
        raise OSError(number, "no")

    def killed() -> None:
        with lock(tmp_path / "x.lock"):
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(fcntl, "flock", missing)
    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    file = tmp_path / ("x.lock" if number == errno.ENOSYS else "x.lock.held")
    assert file.read_text().startswith(f"{process.pid}\n")
    with lock(tmp_path / "x.lock"):
        assert file.read_text().startswith(f"{os.getpid()}\n")


def test_what_is_measured_again_stays_until_it_is_replaced(tmp_path: Path) -> None:
    first = Stage("measure", 1, write_a, measured=True)

    def fail(section: Package, out: Path) -> None:
        raise ValueError

    step = Store(tmp_path).step(first, Package())
    failing = Stage("measure", 1, fail, measured=True)
    assert Store(tmp_path, dry=True).step(failing, Package()).key == step.key
    with pytest.raises(ValueError):
        Store(tmp_path, again=frozenset({"measure"})).step(failing, Package())
    assert (step.path / "a.txt").read_text() == "10"
    assert Store(tmp_path, again=frozenset({"measure"})).step(first, Package()).done
    assert sorted(p.suffix for p in step.path.parent.iterdir()) == ["", ".lock"]


def test_a_step_whose_input_was_measured_again_meanwhile_is_not_kept(tmp_path: Path) -> None:
    values = iter("ab")

    def measure(section: Package, out: Path) -> None:
        (out / "time").write_text(next(values))

    stage = Stage("measure", 1, measure, measured=True)
    first = Store(tmp_path).step(stage, Package())

    def read(section: None, source: Path, out: Path) -> None:
        Store(tmp_path, again=frozenset({"measure"})).step(stage, Package())

    with pytest.raises(MachineError, match="replaced an input of this step"):
        Store(tmp_path).step(Stage("read", 1, read), None, first)
    assert not list(tmp_path.glob(f"read/*/{MADE_FROM}"))
