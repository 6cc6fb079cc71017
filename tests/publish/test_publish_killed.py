"""Tests of publish and pull killed at any instant: old or new bundle, and a rerun finishes."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optimizer.foundation.buckets.blob import digest_of
from optimizer.publish.attachments import SIGNATURE, attachment_path
from optimizer.publish.documents.sign import sign
from optimizer.publish.pull import pull
from optimizer.publish.push import push
from optimizer.publish.registries.layout import OciLayout
from tests import killing
from tests.package.bundles import small_bundle
from tests.publish.registries.test_registry import address, contents
from tests.publish.servers import oci_server
from tests.publish.servers.keys import write_keys

FEW_AND_MANY = [4, pytest.param(30, marks=pytest.mark.slow)]
SENT = ("http.client.",)


def instants(last: int, count: int) -> list[int]:
    return sorted(random.Random(0).sample(range(last), count))


@pytest.fixture
def versions(bundle: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return two signed bundles that share most files, and the public key."""
    private, public = write_keys(tmp_path)
    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    small_bundle.edited(other, lambda m: m.update(licence="mit"))
    for folder in (bundle, other):
        sign(folder, private, attachment_path(folder, SIGNATURE))
    return bundle, other, public


@pytest.mark.parametrize("count", FEW_AND_MANY)
def test_a_push_that_is_killed_leaves_the_tag_on_a_whole_bundle(
    versions: tuple[Path, Path, Path], tmp_path: Path, count: int
) -> None:
    old, new, public = versions
    with oci_server.serving() as server:
        first = push(old, server.client(), "1").digest
        before = dict(server.blobs), dict(server.manifests)
        work = lambda: push(new, server.client(), "1", replace=True)  # noqa: E731
        requests = killing.calls(work, watched=SENT)  # a connection, and a send or two for each
        second = push(new, server.client(), "1", replace=True).digest
        ends = set()
        for instant in instants(requests, count):
            server.blobs, server.manifests = map(dict, before)
            assert killing.wait(killing.start(work, instant, watched=SENT)) == -9
            digest = digest_of(server.manifests["1"][1])
            ends.add(digest)
            into = tmp_path / f"pulled {instant}"
            pull(server.client(), address(server), into, public)
            assert contents(into) == contents(new if digest == second else old)
            there = set(server.blobs)
            server.log.clear()
            assert push(new, server.client(), "1", replace=True).digest == second
            sent = {p.partition("digest=sha256%3A")[2] for m, p, *_ in server.log if m == "PUT"}
            assert not {f"sha256:{d}" for d in sent} & there
        assert first in ends


@pytest.mark.parametrize("count", FEW_AND_MANY)
def test_a_push_to_a_layout_that_is_killed_leaves_the_tag_on_a_whole_bundle(
    versions: tuple[Path, Path, Path], tmp_path: Path, count: int
) -> None:
    old, new, public = versions
    whole = OciLayout(tmp_path / "whole")
    first = push(old, whole, "1").digest
    work = lambda at: push(new, at, "1", replace=True)  # noqa: E731
    again = Path(shutil.copytree(whole.folder, tmp_path / "again"))
    made = killing.calls(partial(work, OciLayout(again)), str(again))
    for instant in instants(made, count):
        folder = Path(shutil.copytree(whole.folder, tmp_path / f"layout {instant}"))
        layout = OciLayout(folder)
        assert killing.wait(killing.start(partial(work, layout), instant, str(folder))) == -9
        data: Any = layout.read_manifest("1")
        into = tmp_path / f"pulled {instant}"
        pull(layout, address_of(folder), into, public)
        assert contents(into) == contents(old if digest_of(data) == first else new)
        second = push(new, layout, "1", replace=True).digest
        assert digest_of(layout.read_manifest("1") or b"") == second


def address_of(folder: Path) -> Any:
    from optimizer.publish.address import BundleAddress

    return BundleAddress("1", "", folder=folder)


@pytest.mark.parametrize("count", FEW_AND_MANY)
def test_a_pull_that_is_killed_leaves_nothing_or_the_bundle_and_the_next_one_goes_on(
    versions: tuple[Path, Path, Path], tmp_path: Path, count: int
) -> None:
    bundle, _, public = versions
    layout = OciLayout(tmp_path / "layout")
    whole = push(bundle, layout, "1").sent
    at = address_of(layout.folder)
    saved = 0
    work = lambda to: pull(layout, at, to, public)  # noqa: E731
    made = killing.calls(partial(work, tmp_path / "once" / "pulled"), str(tmp_path / "once"))
    for instant in instants(made, count):
        into = tmp_path / str(instant) / "pulled"
        into.parent.mkdir()
        assert killing.wait(killing.start(partial(work, into), instant, str(into.parent))) == -9
        if into.exists():
            assert contents(into) == contents(bundle)
            assert attachment_path(into, SIGNATURE).is_file()
        pulled = pull(layout, at, into, public)
        saved += pulled.received < whole // 2
        assert contents(into) == contents(bundle)
        assert {p.name for p in into.parent.iterdir()} <= {
            *("pulled", "pulled.sig", ".pulled.pull.lock")
        }
    assert saved
