"""Tests of a bundle in an object store: parallel writers lose nothing, kills leave old or new."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.foundation.buckets import objects
from optimizer.foundation.buckets.blob import Blob, digest_of
from optimizer.foundation.buckets.objects import BucketObjects
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.harness.errors import BundleError
from optimizer.publish.address import BundleAddress, parse
from optimizer.publish.environments.environments import promote, rollback
from optimizer.publish.environments.prune import prune
from optimizer.publish.pull import pull
from optimizer.publish.push import push
from optimizer.publish.registries.layout import OciLayout
from optimizer.publish.registries.object_store import MARK_LAPSES, ObjectStore
from tests import killing
from tests.publish.environments.test_environments import version
from tests.publish.registries.test_registry import contents
from tests.publish.servers import s3_server

pytest.importorskip("obstore", reason="pip install 'optimize-toolchain[s3]'")
AT = "s3://releases/models/tiny"
FEW_AND_MANY = [2, pytest.param(30, marks=pytest.mark.slow)]


def at(tag: str) -> BundleAddress:
    return parse(f"{AT}:{tag}")


@pytest.fixture
def server() -> Iterator[s3_server.Server]:
    with s3_server.serving() as running:
        yield running


def named(place: ObjectStore, tag: str) -> str:
    return digest_of(place.read_manifest(tag) or b"")


class Overtaken:
    """Objects whose given write of the index comes after that of another writer."""

    def __init__(self, objects: BucketObjects, other: Callable[[], object], turn: int) -> None:
        self._objects, self._other, self._turns = objects, other, turn

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)

    def write(self, name: str, data: bytes, expected: dict[str, str] | None) -> bool:
        if name == "index.json":
            self._turns -= 1
            if self._turns == 0:
                self._other()
        return self._objects.write(name, data, expected)


def overtaken(server: s3_server.Server, turn: int, other: Callable[[], object]) -> ObjectStore:
    objects: object = Overtaken(server.client().objects, other, turn)
    return ObjectStore(objects, sleep=lambda _: None)  # type: ignore[arg-type]


REFERRER, TAG = 1, 2
"""Numbers of the writes of the index when a bundle with a report is pushed."""


@pytest.mark.parametrize("turn", [REFERRER, TAG])
def test_of_two_publishes_at_once_both_stand(
    bundle: Path, server: s3_server.Server, turn: int
) -> None:
    other = version(bundle, "2", None)
    push(bundle, overtaken(server, turn, lambda: push(other, server.client(), "2")), "1")
    assert server.client().tags() == ["1", "2"]
    for tag in "12":
        assert len(server.client().referrers(named(server.client(), tag))) == 1


def test_of_two_publishes_at_once_under_one_tag_the_second_is_refused(
    bundle: Path, server: s3_server.Server
) -> None:
    other = version(bundle, "2", None)
    place = overtaken(server, TAG, lambda: push(other, server.client(), "1"))
    with pytest.raises(RecipeError, match="another bundle was published"):
        push(bundle, place, "1")
    assert push(other, server.client(), "1").sent == 0


def test_a_write_whose_answer_is_lost_counts_once(bundle: Path, server: s3_server.Server) -> None:
    server.silent = 2  # a referrer, and the tag
    digest = push(bundle, server.client(), "1").digest
    assert (server.silent, named(server.client(), "1")) == (0, digest)


def test_a_store_that_ignores_conditions_is_refused_before_a_tag_is_written(
    bundle: Path, server: s3_server.Server
) -> None:
    server.blind = True
    with pytest.raises(MachineError, match="writes would be lost"):
        push(bundle, server.client(), "1")
    assert server.client().tags() == []


@pytest.mark.parametrize("count", FEW_AND_MANY)
def test_killed_at_any_request_the_tag_names_a_whole_bundle_and_nothing_is_sent_twice(
    bundle: Path, tmp_path: Path, server: s3_server.Server, count: int
) -> None:
    other = version(bundle, "2", None)
    old = push(bundle, server.client(), "1").digest
    before = dict(server.objects)
    server.log.clear()
    new = push(other, server.client(), "1", replace=True).digest
    requests, ends = len(server.log), set()
    for instant in [*random.Random(0).sample(range(requests), count - 1), requests - 1]:
        server.objects, server.kill_after = dict(before), instant % 2 == 0
        kill(server, partial(push, other, tag="1", replace=True), instant)
        ends.add(named(server.client(), "1"))
        assert ends <= {old, new}
        into = tmp_path / f"pulled {instant}"
        pull(server.client(), at("1"), into)
        assert contents(into) == contents(other if named(server.client(), "1") == new else bundle)
        there = {key for key in server.objects if "/blobs/" in key}
        server.log.clear()
        assert push(other, server.client(), "1", replace=True).digest == new
        assert not there & set(server.sent())
    assert old in ends


def kill(server: s3_server.Server, work: Callable[[ObjectStore], object], instant: int) -> None:
    """Do the work in a child that is killed at a request."""
    server.kill_at = instant
    child = killing.start_clean(s3_server.with_store, work)
    server.victim = child.pid or 0
    child.join()
    assert child.exitcode in (0, -9)
    server.victim, server.kill_at = 0, -1


@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_any_request_an_environment_names_the_old_or_the_new(
    bundle: Path, server: s3_server.Server, count: int
) -> None:
    for tag in "12":
        push(version(bundle, tag, None), server.client(), tag)
    old, new = (named(server.client(), tag) for tag in "12")
    promote(server.client(), at("1"), "production")
    for instant in range(0, 30, 30 // count):
        changes: tuple[Callable[[ObjectStore], object], ...] = (
            partial(promote, address=at("2"), environment="production", compared=False),
            partial(rollback, environment="production", of="2"),
        )
        for change in changes:
            server.kill_after = instant % 4 == 0
            kill(server, change, instant)
            assert named(server.client(), "production") in (old, new)
            change(server.client())
        assert named(server.client(), "production") == old


def test_a_large_file_goes_in_parts_and_comes_back_equal(
    tmp_path: Path, server: s3_server.Server
) -> None:
    content = random.Random(0).randbytes(100_000)
    file, back = tmp_path / "file", tmp_path / "back"
    file.write_bytes(content)
    blob = Blob(digest_of(content), len(content), file)
    place = server.client(part_size=30_000)
    place.send(blob)
    assert [size for method, _, _, size in server.log if method == "PUT"].count(30_000) == 3
    back.write_bytes(content[:999])  # left by a killed pull
    place.receive(blob.digest, blob.size, back)
    assert (place.has(blob), back.read_bytes() == content) == (True, True)


@pytest.mark.parametrize("part_size", [30_000, 1_000_000])
def test_a_file_that_changes_while_it_is_sent_does_not_appear(
    tmp_path: Path, server: s3_server.Server, part_size: int
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(100_000))
    blob = Blob(digest_of(b"what it was"), 100_000, file)
    with pytest.raises(BundleError, match="the file changed while it was published"):
        server.client(part_size=part_size).send(blob)
    assert (server.objects, server.uploads) == ({}, {})


def test_a_damaged_object_is_refused_by_a_pull_and_mended_by_a_push(
    bundle: Path, tmp_path: Path, server: s3_server.Server
) -> None:
    push(bundle, server.client(), "1")
    manifest = json.loads(server.client().read_manifest("1") or b"")
    key = f"models/tiny/blobs/sha256/{manifest['layers'][0]['digest'][7:]}"
    whole = server.objects[key]
    for other in (whole[:-1], b"\0" * len(whole)):
        server.objects[key] = other
        with pytest.raises(BundleError):
            pull(server.client(), at("1"), tmp_path / "pulled")
        assert not (tmp_path / "pulled").exists()
    push(bundle, server.client(), "1")
    assert contents(pull(server.client(), at("1"), tmp_path / "x").folder) == contents(bundle)


def test_what_is_copied_to_a_disk_is_a_layout(
    bundle: Path, tmp_path: Path, server: s3_server.Server
) -> None:
    push(bundle, server.client(), "1")
    for key, data in server.objects.items():
        file = tmp_path / "disk" / Path(key).relative_to("models/tiny")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    layout = OciLayout(tmp_path / "disk")
    folder = pull(layout, BundleAddress("1", "", folder=layout.folder), tmp_path / "x").folder
    assert contents(folder) == contents(bundle)


@pytest.fixture
def released(bundle: Path, server: s3_server.Server) -> ObjectStore:
    """Return versions 1 to 3; production named 1 and 2, and names 1."""
    place = server.client()
    for tag in "123":
        push(version(bundle, tag, None), place, tag)
    for tag in "12":
        promote(place, at(tag), "production", compared=False)
    rollback(place, "production")
    return place


def test_a_prune_removes_what_nothing_names_and_a_dry_run_says_so(
    released: ObjectStore, tmp_path: Path, server: s3_server.Server
) -> None:
    before = dict(server.objects)
    said = prune(released, 1)
    assert (said.versions, said.kept, server.objects) == (("2",), ("1", "3"), before)
    assert prune(released, 1, delete=True) == said
    assert len(server.objects) == len(before) - said.blobs
    for tag in ("3", "production"):
        pull(released, at(tag), tmp_path / tag)


def test_while_a_prune_removes_nobody_else_writes_until_its_mark_lapses(
    bundle: Path, released: ObjectStore, server: s3_server.Server
) -> None:
    before = dict(server.objects)
    with released.lock(), pytest.raises(MachineError, match="another prune, begun at"):
        push(bundle, server.client(), "5")
    push(bundle, server.client(), "5")
    server.objects = before
    later = datetime.now(UTC) + MARK_LAPSES + timedelta(seconds=1)

    def prune_for_too_long() -> None:
        with released.lock():
            push(bundle, ObjectStore(server.client().objects, now=lambda: later), "5")
            released.drop_tags({"1"})

    with pytest.raises(MachineError, match="others may write again"):
        prune_for_too_long()
    assert server.client().tags() == ["1", "2", "3", "5", "production", "production.history"]


def test_what_was_pruned_while_it_was_published_is_not_named(
    bundle: Path, server: s3_server.Server
) -> None:
    push(version(bundle, "1", None), server.client(), "1")
    other = version(bundle, "2", None)
    place = overtaken(server, TAG, lambda: prune(server.client(), 1, delete=True))
    with pytest.raises(MachineError, match="removed meanwhile"):
        push(other, place, "2")
    push(other, server.client(), "2")
    assert prune(server.client(), 2).blobs == 0


def optimize(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_the_commands_take_the_address(
    bundle: Path, tmp_path: Path, server: s3_server.Server
) -> None:
    assert optimize("publish", bundle, AT).exit_code == 0
    assert optimize("promote", f"{AT}:1", "--to", "production").exit_code == 0
    listed = json.loads(optimize("--json", "versions", AT).stdout)["versions"]
    assert (set(listed), len(set(listed.values()))) == ({"1", "production"}, 1)
    assert optimize("pull", f"{AT}:production", "--to", tmp_path / "x").exit_code == 0
    pruned = json.loads(optimize("--json", "prune", AT, "--keep", "1").stdout)
    assert (pruned["versions"], pruned["blobs"]) == ([], 0)
    server.shutdown()
    server.server_close()
    unreachable = optimize("versions", AT)
    assert (unreachable.exit_code, "does not answer" in unreachable.stderr) == (5, True)


def test_no_message_holds_a_secret(bundle: Path, server: s3_server.Server) -> None:
    for address in (
        f"s3://key:{s3_server.SECRET}@releases/models/tiny",
        f"s3://key:{s3_server.SECRET}@releases",
        f"{AT}?X-Amz-Signature={s3_server.SECRET}",
    ):
        refused = optimize("publish", bundle, address)
        assert (refused.exit_code, "a password" in refused.stderr) == (2, True)
        assert s3_server.SECRET not in refused.output
    missing = optimize("versions", "s3://another-bucket/x")
    assert (missing.exit_code, "no such bucket" in missing.stderr) == (5, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        nobody = optimize("versions", AT)
    assert (nobody.exit_code, "aws configure" in nobody.stderr) == (5, True)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "find_spec", lambda name: None)
    result = optimize("versions", AT)
    assert (result.exit_code, "optimize-toolchain[s3]" in result.stderr) == (5, True)
