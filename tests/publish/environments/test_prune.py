"""Tests of prune: it removes unreferenced blobs; kept versions stay complete, also after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from optimizer.cli import main
from optimizer.foundation.buckets.blob import digest_of
from optimizer.foundation.errors import MachineError
from optimizer.publish.address import BundleAddress
from optimizer.publish.attachments import SIGNATURE, attachment_path
from optimizer.publish.documents.sign import sign
from optimizer.publish.environments.environments import promote, rollback
from optimizer.publish.environments.prune import prune
from optimizer.publish.pull import pull
from optimizer.publish.push import push
from optimizer.publish.registries.index import list_referenced_digests
from optimizer.publish.registries.layout import OciLayout
from tests import killing
from tests.publish.environments.test_environments import version
from tests.publish.servers.keys import write_keys


def at(layout: OciLayout, tag: str) -> BundleAddress:
    return BundleAddress(tag, "", folder=layout.folder)


@pytest.fixture
def layout(bundle: Path, tmp_path: Path) -> OciLayout:
    """Return signed versions 1 to 5; production named 1, 2, 3, and was rolled back to 2."""
    layout = OciLayout(tmp_path / "layout")
    private, _ = write_keys(tmp_path)
    for tag in "12345":
        folder = version(bundle, tag, None)
        sign(folder, private, attachment_path(folder, SIGNATURE))
        push(folder, layout, tag)
    for tag in "123":
        promote(layout, at(layout, tag), "production", compared=False)
    rollback(layout, "production")
    return layout


def is_whole(layout: OciLayout, tmp_path: Path, tags: str) -> bool:
    """Return True if these versions can be pulled, with their signatures."""
    folders = [pull(layout, at(layout, t), tmp_path / f"pulled {t}").folder for t in tags]
    return all(attachment_path(folder, SIGNATURE).is_file() for folder in folders)


def test_environments_their_way_back_and_the_newest_stay(layout: OciLayout, tmp_path: Path) -> None:
    pruned = prune(layout, 1, delete=True)
    assert (pruned.versions, pruned.kept) == (("3", "4"), ("1", "2", "5"))
    assert layout.tags() == ["1", "2", "5", "production", "production.history"]
    assert is_whole(layout, tmp_path, "125")
    rollback(layout, "production")
    assert layout.read_manifest("production") == layout.read_manifest("1")


def test_a_dry_run_says_the_same_and_removes_nothing(layout: OciLayout) -> None:
    before = sorted(p.name for p in layout.folder.rglob("*"))
    said = prune(layout, 2)
    assert sorted(p.name for p in layout.folder.rglob("*")) == before
    assert prune(layout, 2, delete=True) == said
    assert said.size > 0
    assert prune(layout, 2, delete=True).blobs == 0


def test_blobs_left_after_a_prune_are_referenced(layout: OciLayout) -> None:
    prune(layout, 1, delete=True)
    named: set[str] = set(layout.resolve_tags().values())
    for digest in [*named]:
        data: Any = layout.read_manifest(digest)
        for inner in list_referenced_digests(json.loads(data)):
            named.add(inner)
            if "manifests" in json.loads(data):
                named |= set(
                    list_referenced_digests(json.loads(layout.read_manifest(inner) or b"{}"))
                )
    blobs = {f"sha256:{p.name}" for p in (layout.folder / "blobs/sha256").iterdir()}
    assert blobs == named


def test_a_prune_killed_at_any_instant_leaves_complete_versions(
    layout: OciLayout, tmp_path: Path
) -> None:
    for instant in range(0, 60, 24):
        pid = killing.start(lambda: prune(layout, 1, delete=True), 40 + instant, str(layout.folder))
        assert killing.wait(pid) in (0, -9)
        work = tmp_path / str(instant)
        work.mkdir()
        assert is_whole(layout, work, "125")
    prune(layout, 1, delete=True)
    assert prune(layout, 1).blobs == 0


def test_a_push_whose_files_were_pruned_meanwhile_leaves_no_broken_tag(
    bundle: Path, tmp_path: Path
) -> None:
    layout = OciLayout(tmp_path / "layout")
    push(bundle, layout, "1")
    data = layout.read_manifest("1") or b""
    layer = json.loads(data)["layers"][0]["digest"]
    layout.blob(layer).unlink()
    with pytest.raises(MachineError, match="removed meanwhile"):
        layout.write_manifest(data, "2")
    assert layout.tags() == ["1"]
    assert push(bundle, layout, "2").digest == digest_of(data)


def test_the_command_says_what_would_go(layout: OciLayout) -> None:
    words = ["--json", "prune", f"file://{layout.folder}", "--keep", "1"]
    document = json.loads(CliRunner().invoke(main, words).stdout)
    assert (document["deleted"], document["versions"]) == (False, ["3", "4"])
    result = CliRunner().invoke(main, ["prune", "oci://localhost/x", "--keep", "1"])
    assert (result.exit_code, "their own retention" in result.stderr) == (2, True)
