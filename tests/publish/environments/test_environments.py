"""Tests of promote and rollback: refused bundles, and kills that leave the old or the new one."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.foundation.buckets.blob import digest_of
from optimizer.foundation.errors import GateError, InconclusiveError, RecipeError
from optimizer.harness.errors import BundleError
from optimizer.package import manifest as manifests
from optimizer.publish.address import BundleAddress
from optimizer.publish.attachments import SIGNATURE, attachment_path
from optimizer.publish.documents.sign import sign
from optimizer.publish.environments import environments
from optimizer.publish.environments.comparison import compare
from optimizer.publish.environments.environments import promote, rollback
from optimizer.publish.hubs.folders import Folders
from optimizer.publish.push import push
from optimizer.publish.registries.layout import OciLayout
from optimizer.publish.registries.place import Place, Releases
from tests import killing
from tests.publish.servers import hub_server, oci_server, s3_server
from tests.publish.servers.keys import write_keys

EXAMPLES = 400


def quality(right: int, metric: str = "accuracy", **changes: Any) -> dict[str, Any]:
    """Return a quality section with the first `right` of EXAMPLES correct."""
    each = {"kind": "right", "candidate": "1" * right + "0" * (EXAMPLES - right)}
    value = {"value": right / EXAMPLES}
    section = {"metric": metric, "margin": 0.02, "confidence": 0.95, "each": each}
    return {**section, "baseline": value, "candidate": value, **changes}


def version(bundle: Path, name: str, section: dict[str, Any] | None) -> Path:
    """Make a bundle of this version whose report has this quality section."""
    folder = Path(shutil.copytree(bundle, bundle.parent / f"version-{name}"))
    reports = json.loads((folder / "report.json").read_text())
    reports[0]["quality"] = section
    (folder / "report.json").write_text(json.dumps(reports))
    document = json.loads((folder / "manifest.json").read_bytes())
    manifests.write(folder, {**document, "version": name})
    return folder


@contextmanager
def published(
    kind: str, folders: list[Path], work: Path
) -> Iterator[tuple[Place | Folders, list[BundleAddress]]]:
    """Return a place with versions 1, 2, ..., and their addresses."""
    tags = [str(i + 1) for i in range(len(folders))]
    servers = {"hub": hub_server.serving, "s3": s3_server.serving}
    with servers.get(kind, oci_server.serving)() as server:
        folder = work / "layout"
        place = OciLayout(folder) if kind == "layout" else server.client()
        for tag, bundle in zip(tags, folders, strict=True):
            push(bundle, place, tag)
        yield place, [BundleAddress(tag, "", folder=folder) for tag in tags]


def named(place: Releases, tag: str) -> str:
    data = place.read_manifest(tag)
    return "" if data is None else digest_of(data)


@pytest.mark.parametrize("kind", ["layout", "registry", "hub", s3_server.KIND])
def test_an_environment_goes_forward_and_back_and_says_what_it_named(
    bundle: Path, tmp_path: Path, kind: str
) -> None:
    folders = [version(bundle, str(i), quality(360)) for i in range(1, 4)]
    with published(kind, folders, tmp_path) as (place, versions):
        digests = [named(place, v.tag) for v in versions]
        for address, before, after in zip(versions, ["", *digests], digests, strict=False):
            done = promote(place, address, "production")
            assert (done.before, done.after, named(place, "production")) == (before, after, after)
        assert promote(place, versions[2], "production").before == digests[2]
        assert environments.read_history(place, "production") == digests
        assert rollback(place, "production").after == digests[1]
        assert rollback(place, "production", of="3").after == digests[1]
        assert rollback(place, "production").after == digests[0]
        with pytest.raises(RecipeError, match="no earlier bundle"):
            rollback(place, "production")
        promote(place, versions[2], "production")
        assert rollback(place, "production").after == digests[0]


@pytest.mark.parametrize(
    ("right", "error"), [(360, None), (320, GateError), (350, InconclusiveError), (380, None)]
)
def test_what_is_worse_by_the_paired_test_is_refused(
    bundle: Path, tmp_path: Path, right: int, error: type[Exception] | None
) -> None:
    folders = [version(bundle, "1", quality(360)), version(bundle, "2", quality(right))]
    with published("layout", folders, tmp_path) as (place, (one, two)):
        promote(place, one, "production")
        if error is None:
            assert promote(place, two, "production").comparisons[0].verdict == "pass"
        else:
            with pytest.raises(error, match="accuracy: worse by"):
                promote(place, two, "production")
            assert named(place, "production") == named(place, "1")
            promote(place, two, "production", compared=False)
            assert named(place, "production") == named(place, "2")


INCOMPARABLE: dict[str, dict[str, Any] | None] = {
    "its metric is f1": quality(360, "f1"),
    "lack comparable results": quality(360, each=None),
    "different numbers of rows": quality(360, each={"kind": "right", "candidate": "1"}),
    "no target and metric in common": None,
}


@pytest.mark.parametrize("why", INCOMPARABLE)
def test_what_cannot_be_compared_is_inconclusive_and_says_why(
    bundle: Path, tmp_path: Path, why: str
) -> None:
    folders = [version(bundle, "1", quality(360)), version(bundle, "2", INCOMPARABLE[why])]
    with published("layout", folders, tmp_path) as (place, (one, two)):
        promote(place, one, "production")
        with pytest.raises(InconclusiveError, match=why):
            promote(place, two, "production")


def test_results_on_other_rows_are_not_compared() -> None:
    report = [{"target": "t", "quality": quality(360)}]
    old, new = ({"calibration": {"validate": digest}} for digest in ("a", "b"))
    (comparison,) = compare(old, report, new, report)
    assert (comparison.verdict, "different rows" in comparison.message) == ("inconclusive", True)
    assert compare(old, report, old, report)[0].verdict == "pass"


@pytest.mark.parametrize(("worse", "verdict"), [(0.0, "pass"), (0.05, "fail")])
def test_nats_are_compared_window_by_window(worse: float, verdict: str) -> None:
    rng = random.Random(0)
    nats = [rng.gauss(3, 1) for _ in range(40)]
    more = [n + worse + rng.gauss(0, 0.01) for n in nats]
    manifest = {"calibration": {"validate": "a"}}
    reports = [
        [
            {
                "target": "t",
                "quality": quality(0, "perplexity", each={"kind": "nats", "candidate": v}),
            }
        ]
        for v in (nats, more)
    ]
    (comparison,) = compare(manifest, reports[0], manifest, reports[1])
    assert comparison.verdict == verdict


def test_a_required_signature_is_verified_without_fetching_the_model(
    bundle: Path, tmp_path: Path
) -> None:
    private, public = write_keys(tmp_path)
    _, other = write_keys(tmp_path, "other")
    folders = [version(bundle, "1", None), version(bundle, "2", None)]
    sign(folders[1], private, attachment_path(folders[1], SIGNATURE))
    with oci_server.serving() as server:
        place = server.client()
        for tag, folder in zip("12", folders, strict=True):
            push(folder, place, tag)
        one, two = (BundleAddress(tag, "", host=server.host, name="models/tiny") for tag in "12")
        with pytest.raises(BundleError, match="no signature"):
            promote(place, one, "production", key=public)
        with pytest.raises(BundleError, match="is of the key"):
            promote(place, two, "production", key=other)
        server.log.clear()
        promote(place, two, "production", key=public)
        fetched = {p.rpartition("/")[2] for m, p, *_ in server.log if m == "GET"}
        model = json.loads((folders[1] / "manifest.json").read_bytes())["files"]
        assert f"sha256:{model['model/onnxruntime-cpu/model.onnx']['sha256']}" not in fetched
        assert named(place, "production") == named(place, "2")


@pytest.mark.parametrize("kind", ["layout", "hub"])
def test_of_eight_promotions_at_once_one_wins_and_seven_say_why(
    bundle: Path, tmp_path: Path, kind: str
) -> None:
    folders = [version(bundle, str(i), None) for i in range(9)]
    with published(kind, folders, tmp_path) as (place, versions):
        promote(place, versions[0], "production")
        before = named(place, "production")
        reader, writer = os.pipe()

        def work(address: BundleAddress) -> None:
            """Read the environment, wait until all have, then move it."""
            data = place.read_manifest(address.tag) or b""
            os.read(reader, 1)
            environments.move(place, "production", data, before)

        place.close()  # a child opens another one
        children = [killing.start(lambda a=a: work(a)) for a in versions[1:]]
        os.write(writer, b"x" * 8)
        exits = sorted(killing.wait(child) for child in children)
        after = named(place, "production")
        assert exits == [0] + [1] * 7
        assert environments.read_history(place, "production") == [before, after]
    os.close(reader)
    os.close(writer)


def _move(store: Releases, tag: str, before: str) -> None:
    environments.move(store, "production", store.read_manifest(tag) or b"", before)


@pytest.mark.parametrize("kind", [s3_server.KIND])
def test_of_eight_promotions_at_once_in_an_object_store_one_wins(
    bundle: Path, tmp_path: Path, kind: str
) -> None:
    folders = [version(bundle, str(i), None) for i in range(9)]
    with published(kind, folders, tmp_path) as (place, versions):
        promote(place, versions[0], "production")
        before = named(place, "production")
        moves = [partial(_move, tag=address.tag, before=before) for address in versions[1:]]
        children = [killing.start_clean(s3_server.with_store, move) for move in moves]
        for child in children:
            child.join()
        assert sorted(child.exitcode or 0 for child in children) == [0] + [1] * 7
        assert environments.read_history(place, "production") == [
            before,
            named(place, "production"),
        ]


def test_the_second_writer_is_told(bundle: Path, tmp_path: Path) -> None:
    with published("layout", [version(bundle, "1", None)], tmp_path) as (place, (one,)):
        promote(place, one, "production")
        data = place.read_manifest("1") or b""
        with pytest.raises(RecipeError, match="another promotion or rollback came first"):
            environments.move(place, "production", data, "sha256:" + "0" * 64)


@pytest.mark.parametrize("count", [6, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["layout", "registry"])
def test_killed_at_any_instant_the_environment_names_the_old_or_the_new(
    bundle: Path, tmp_path: Path, kind: str, count: int
) -> None:
    folders = [version(bundle, str(i), quality(360)) for i in (1, 2)]
    with published(kind, folders, tmp_path) as (place, (one, two)):
        old, new = named(place, "1"), named(place, "2")
        promote(place, one, "production")
        below, watched = (str(tmp_path), killing.WATCHED)
        if kind == "registry":
            below, watched = "", ("http.client.",)
        instants = range(0, 120, 120 // count) if kind == "layout" else range(count)
        for instant in instants:
            for change, allowed in (
                (lambda: promote(place, two, "production"), {old, new}),
                (lambda: rollback(place, "production", of="2"), {old, new}),
            ):
                pid = killing.start(change, instant, below, watched)
                assert killing.wait(pid) in (0, -9)
                place.close()
                assert named(place, "production") in allowed
                change()
            assert named(place, "production") == old


def optimize(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_the_commands_promote_and_roll_back(bundle: Path, tmp_path: Path) -> None:
    at = f"file://{tmp_path / 'releases'}"
    for tag, right in (("1", 360), ("2", 320)):
        assert optimize("publish", version(bundle, tag, quality(right)), at).exit_code == 0
    first = json.loads(optimize("--json", "promote", f"{at}:1", "--to", "production").stdout)
    worse = optimize("--json", "promote", f"{at}:2", "--to", "production")
    assert (worse.exit_code, "worse by 0.1" in json.loads(worse.stdout)["found"]) == (3, True)
    assert (
        optimize(*("promote", f"{at}:2", "--to", "production", "--without-comparison")).exit_code
        == 0
    )
    listed = json.loads(optimize("--json", "versions", at).stdout)["versions"]
    assert listed["production"] == listed["2"]
    assert set(listed) == {"1", "2", "production"}
    back = json.loads(optimize("--json", "rollback", at, "--from", "production").stdout)
    assert back["after"] == first["after"]
    pulled = optimize("pull", f"{at}:production", "--to", tmp_path / "pulled")
    assert (pulled.exit_code, first["after"] in pulled.stdout) == (0, True)


@pytest.mark.parametrize("name", ["", "a.history", "a b", "x" * 80])
def test_an_environment_has_a_plain_name(bundle: Path, tmp_path: Path, name: str) -> None:
    result = optimize("rollback", f"file://{tmp_path / 'releases'}", "--from", name)
    assert (result.exit_code, "not valid as an environment's name" in result.stderr) == (2, True)
