"""The laws at the top of shared_store.py, on a local S3 server, and in buckets of other kinds."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from optimizer.cli import main
from optimizer.commands.build import predictions, room
from optimizer.foundation.buckets.blob import Blob
from optimizer.foundation.buckets.objects import BucketObjects
from optimizer.foundation.errors import MachineError, RecipeError, StoreError
from optimizer.recipe.schema import Package
from optimizer.search import on_ray
from optimizer.search.progress import Progress, finished_steps
from optimizer.shared_store import SharedStore
from optimizer.store import MADE_FROM, Stage, Step, Store, recorded_files
from tests import killing
from tests.publish.registries import test_objects
from tests.publish.servers import s3_server

pytest.importorskip("obstore", reason="pip install 'optimize-toolchain[s3]'")
ADDRESS = f"s3://{s3_server.BUCKET}/steps/of/us"
KEY = "steps/of/us"


@pytest.fixture(scope="module")
def running() -> Iterator[s3_server.Server]:
    with s3_server.serving() as server:
        yield server


@pytest.fixture
def server(running: s3_server.Server) -> s3_server.Server:
    running.objects.clear()
    running.log.clear()
    return running


@pytest.fixture(scope="module")
def objects(running: s3_server.Server) -> BucketObjects:
    """Return the client of all stores: a connection takes longer than a test."""
    return BucketObjects("s3", s3_server.BUCKET, KEY, part_size=30_000)


@pytest.fixture
def machines(
    server: s3_server.Server, objects: BucketObjects, tmp_path: Path
) -> tuple[SharedStore, SharedStore]:
    """Return the store as two machines have it, each with a folder of its own."""
    one, two = (SharedStore(ADDRESS, tmp_path / name) for name in ("one", "two"))
    one._objects = two._objects = objects
    return one, two


@pytest.fixture(params=test_objects.KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[SharedStore, SharedStore]]:
    """Return the store as two machines have it, in a bucket of each kind."""
    kind = request.param
    if kind == "s3":
        yield request.getfixturevalue("machines")
        return
    with test_objects.opened(kind, tmp_path) as objects:
        address = f"{kind}://releases/{test_objects.PREFIX}"
        one, two = (SharedStore(address, tmp_path / name) for name in ("one", "two"))
        one._objects = two._objects = objects
        yield one, two


class Counting:
    """Stage that writes how often it ran, in two files of one content and a folder."""

    def __init__(self, measured: bool = False, during: Callable[[], object] = lambda: None) -> None:
        self.runs, self.during = 0, during
        self.stage = Stage("count", 1, self.run, measured=measured)

    def run(self, section: Package | None, *inputs: Path, out: Path) -> None:
        self.runs += 1
        count = f"{self.runs}"  # `during` may run another
        self.during()
        (out / "part").mkdir()
        (out / "part" / "a.txt").write_text(count)
        (out / "b.txt").write_text(count)


def text(step: Step) -> str:
    return (step.path / "part" / "a.txt").read_text() + (step.path / "b.txt").read_text()


def test_a_step_of_another_machine_is_fetched_and_is_the_same_to_the_last_byte(
    pair: tuple[SharedStore, SharedStore],
) -> None:
    one, two = pair
    counting = Counting()
    made = Store(one).step(counting.stage, Package())
    other = Store(two)
    step = other.step(counting.stage, Package())
    assert (other.log[0]["what"], counting.runs, text(step)) == ("fetched", 1, "11")
    assert (step.path / MADE_FROM).read_bytes() == (made.path / MADE_FROM).read_bytes()
    assert sorted(p.suffix for p in step.path.parent.iterdir()) == ["", ".lock"]
    again = Store(two)
    again.step(counting.stage, Package())
    assert again.log[0]["what"] == "reused"


def test_the_list_of_files_is_written_last(
    machines: tuple[SharedStore, SharedStore], server: s3_server.Server
) -> None:
    step = Store(machines[0]).step(Counting().stage, Package())
    assert server.sent()[-1] == f"{KEY}/steps/count/{step.key}.json"
    assert sorted(server.objects) == sorted({*server.sent()})


def write_one(section: Package | None, out: Path) -> None:
    (out / "x").write_text("x")


ONE = Stage("s", 1, write_one)


def make_one(cache: Path) -> None:
    Store(SharedStore(ADDRESS, cache)).step(ONE, None)


@pytest.mark.parametrize("after", [False, True])
def test_a_machine_killed_while_it_sends_leaves_a_whole_step_or_none(
    server: s3_server.Server, tmp_path: Path, after: bool
) -> None:
    make_one(tmp_path / "first")
    last = len(server.log) - 1
    server.objects.clear()
    server.kill_at, server.kill_after = last, after
    child = killing.start_clean(make_one, tmp_path / "one")
    server.victim = child.pid or 0
    child.join()
    server.victim, server.kill_at = 0, -1
    assert child.exitcode == -9
    for cache, what in (("one", "reused"), ("two", "fetched")):
        store = Store(SharedStore(ADDRESS, tmp_path / cache))
        if cache == "one":
            assert finished_steps(store.root) == after
        step = store.step(ONE, None)
        assert (store.log[0]["what"], (step.path / "x").read_text()) == (what, "x")


def test_of_two_machines_that_make_a_step_at_once_the_second_takes_the_files_of_the_first(
    pair: tuple[SharedStore, SharedStore],
) -> None:
    one, two = pair
    results: list[Step] = []

    def overtake() -> None:
        if counting.runs == 1:
            results.append(Store(two).step(counting.stage, Package()))

    counting = Counting(measured=True, during=overtake)
    step = Store(one).step(counting.stage, Package())
    assert (counting.runs, text(results[0])) == (2, "22")
    assert text(step) == "22"
    assert (step.identity, step.key) == (results[0].identity, results[0].key)


def test_what_is_measured_again_replaces_the_step_on_all_machines(
    pair: tuple[SharedStore, SharedStore],
) -> None:
    one, two = pair
    counting = Counting(measured=True)
    for machine in pair:
        Store(machine).step(counting.stage, Package())
    new = Store(one, again=frozenset({"count"})).step(counting.stage, Package())
    planned = Store(two, dry=True).step(counting.stage, Package())
    assert (planned.done, planned.identity) == (False, new.identity)
    assert text(Store(two).step(counting.stage, Package())) == "22"


def truncate(data: bytes) -> bytes:
    return data[:-1]


def alter(data: bytes) -> bytes:
    return b"?" * len(data)


@pytest.mark.parametrize("harm", [truncate, alter, None])
@pytest.mark.parametrize("part", ["files", "steps"])
def test_a_damaged_step_is_named_made_again_and_replaced(
    machines: tuple[SharedStore, SharedStore],
    server: s3_server.Server,
    capsys: pytest.CaptureFixture[str],
    part: str,
    harm: Callable[[bytes], bytes] | None,
) -> None:
    one, two = machines
    counting = Counting()
    Store(one).step(counting.stage, Package())
    (name,) = (n for n in server.objects if n.startswith(f"{KEY}/{part}/"))
    whole = server.objects.pop(name)
    if harm is not None:
        server.objects[name] = harm(whole)
    counting.runs = 0  # it makes the same bytes again
    step = Store(two).step(counting.stage, Package())
    assert (counting.runs, text(step)) == (1, "11")
    assert json.loads(server.objects[name] if part == "steps" else whole) == json.loads(whole)
    assert server.objects[name] == whole
    if part == "files":
        assert f"{name.removeprefix(KEY)} is " in capsys.readouterr().err


def test_a_damaged_file_is_replaced_in_a_bucket_of_each_kind(
    pair: tuple[SharedStore, SharedStore],
) -> None:
    one, two = pair
    step = Store(one).step(ONE, None)
    (name,) = one._objects.sizes("files")
    one._objects.put(name, Blob.describe(b"?"))
    assert (Store(two).step(ONE, None).path / "x").read_text() == "x"
    assert one.read(name) == (step.path / "x").read_bytes()


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out"])
def test_a_list_that_names_a_file_outside_of_the_step_is_not_followed(
    machines: tuple[SharedStore, SharedStore], server: s3_server.Server, name: str
) -> None:
    counting = Counting()
    step = Store(machines[0]).step(counting.stage, Package())
    key = f"{KEY}/steps/count/{step.key}.json"
    document = json.loads(server.objects[key])
    document["files"] = {name: document["files"]["b.txt"]}
    server.objects[key] = json.dumps(document).encode()
    Store(machines[1]).step(counting.stage, Package())
    assert counting.runs == 2
    assert not list(machines[1].cache.rglob("out"))


CONTENT = bytes(range(256)) * 400


def write_large(section: Package | None, out: Path) -> None:
    (out / "large").write_bytes(CONTENT)


LARGE = Stage("large", 1, write_large)


def test_large_files_travel_in_parts(
    machines: tuple[SharedStore, SharedStore],
    server: s3_server.Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = machines
    monkeypatch.setattr("optimizer.foundation.buckets.objects.PIECE", 40_000)
    Store(one).step(LARGE, None)
    assert [size for method, _, _, size in server.log if method == "PUT"].count(30_000) == 3
    step = Store(two).step(LARGE, None)
    assert (step.path / "large").read_bytes() == CONTENT
    assert sum(method == "GET" and "/files/" in key for method, key, _, _ in server.log) == 3


def test_a_damaged_file_that_was_sent_in_parts_is_replaced(
    machines: tuple[SharedStore, SharedStore], server: s3_server.Server
) -> None:
    """Its ETag is not its MD5, so that it looks the same without a read."""
    Store(machines[0]).step(LARGE, None)
    (name,) = (n for n in server.objects if "/files/" in n)
    server.objects[name] = alter(CONTENT)
    step = Store(machines[1]).step(LARGE, None)
    assert (step.path / "large").read_bytes() == CONTENT == server.objects[name]


def test_a_plan_names_the_bytes_to_fetch_and_writes_nothing(
    machines: tuple[SharedStore, SharedStore], server: s3_server.Server
) -> None:
    one, two = machines
    counting = Counting(measured=True)
    first = Store(one).step(counting.stage, Package())
    after = Store(one).step(counting.stage, None, first)
    before, dry = dict(server.objects), Store(two, dry=True)
    planned = dry.step(counting.stage, Package())
    assert dry.step(counting.stage, None, planned).key == after.key
    dry.step(counting.stage, Package(version="2"))
    entries = predictions.build_document(dry)
    assert [(e["what"], e["disk"]) for e in entries] == [("fetch", 2), ("fetch", 2), ("run", 0)]
    assert "fetch           -      2 B" in predictions.format_entries(entries)
    assert (server.objects, two.folder.exists()) == (before, False)
    with pytest.raises(MachineError, match=r"predicted disk use is .*--store-cache"):
        room.check([{**entries[0], "disk": 10**18}], two, None)


def test_the_progress_of_a_search_is_that_of_its_last_machine(
    pair: tuple[SharedStore, SharedStore],
) -> None:
    one, two = pair
    Progress(one, "tiny", "recipe", lambda: 50.0, 0.0).end(1)
    again = Progress(two, "tiny", "recipe", lambda: 7.0, 0.0)
    assert (again.finished, again.seconds) == (1, 57.0)
    Store(one).step(Counting().stage, Package())
    assert finished_steps(two) == 1


def test_a_node_that_reaches_another_store_or_none_is_refused(
    machines: tuple[SharedStore, SharedStore], server: s3_server.Server
) -> None:
    one, version = machines[0], on_ray._version()
    with on_ray._mark(one) as mark:
        sent = pickle.loads(pickle.dumps(mark))
        assert on_ray._why_not(sent, version) == ("", "")
        server.objects.clear()
        sent = pickle.loads(pickle.dumps(mark))
        assert "another store" in on_ray._why_not(sent, version)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("AWS_ACCESS_KEY_ID")
            patch.delenv("AWS_SECRET_ACCESS_KEY")
            sent = pickle.loads(pickle.dumps(mark))
            assert "no credentials" in on_ray._why_not(sent, version)[0]


def test_a_store_of_another_format_or_without_conditions_is_refused(
    machines: tuple[SharedStore, SharedStore], server: s3_server.Server
) -> None:
    server.objects[f"{KEY}/store.json"] = b'{"format": 2}'
    with pytest.raises(StoreError, match=r"format 2\. Accepted: format 1.*another prefix") as e:
        Store(machines[0]).step(Counting().stage, Package())
    assert e.value.exit_code == 5
    server.objects.clear()
    server.blind = True
    with pytest.raises(StoreError, match="ignores the conditions of writes"):
        Store(machines[0]).step(Counting().stage, Package())
    server.blind = False


def test_an_unreachable_bucket_ends_a_search_and_says_what_to_do(
    server: s3_server.Server, tmp_path: Path
) -> None:
    missing = SharedStore("s3://another/steps", tmp_path)
    with pytest.raises(StoreError, match=r"no such bucket.*Create it first.*are kept"):
        Store(missing, dry=True).step(Counting().stage, Package())


def optimize(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(map(str, words)))
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--store", "http://x/y"), "is not that of a store. Accepted: a folder, s3://BUCKET"),
        (("--store", "s3://key:the-secret@bucket/x"), "the address is not that of a store"),
        (("--store-cache", "x"), "--store-cache is for a --store in a bucket"),
    ],
)
def test_wrong_options_are_refused(words: tuple[str, ...], message: str) -> None:
    code, output = optimize("plan", "recipe.yaml", *words)
    assert (code, message in output, "the-secret" in output) == (2, True, False)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.foundation.buckets.objects.find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"obstore is not installed.*optimize-toolchain\[gs\]"):
        SharedStore("gs://bucket/x", Path())


def test_an_address_without_a_prefix_is_refused() -> None:
    with pytest.raises(RecipeError, match="Accepted: a folder, s3://BUCKET/PREFIX"):
        SharedStore("s3://bucket", Path())


def test_a_step_made_before_there_was_a_bucket_is_sent(
    pair: tuple[SharedStore, SharedStore],
) -> None:
    one, two = pair
    counting = Counting()
    step = Store(one.folder).step(counting.stage, Package())
    assert finished_steps(two) == 0
    Store(one).step(counting.stage, Package())
    assert (finished_steps(two), counting.runs) == (1, 1)
    assert recorded_files(Store(two).step(counting.stage, Package()).path) == recorded_files(
        step.path
    )
