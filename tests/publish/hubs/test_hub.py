"""Tests of publishing to a model hub: plain files, a model card, and the hub's rules."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import ModelCard, snapshot_download

from optimizer.cli import main
from optimizer.foundation.buckets.blob import digest_of
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.harness.errors import BundleError
from optimizer.harness.trust import verify
from optimizer.package import manifest
from optimizer.publish.address import parse
from optimizer.publish.attachments import SIGNATURE, attachment_path
from optimizer.publish.documents.sign import sign
from optimizer.publish.environments.environments import promote, rollback
from optimizer.publish.hubs.folders import Folders
from optimizer.publish.pull import pull
from optimizer.publish.push import push
from tests import killing
from tests.package.bundles import small_bundle
from tests.publish.environments.test_environments import named, quality, version
from tests.publish.registries.test_registry import contents
from tests.publish.servers import hub_server
from tests.publish.servers.keys import write_keys

ONE = parse(f"hf://{hub_server.REPOSITORY}:1")
OURS = {"README.md", ".gitattributes"}


@pytest.fixture
def server() -> Iterator[hub_server.Server]:
    with hub_server.serving() as running:
        yield running


def other(bundle: Path, name: str = "other") -> Path:
    """Make another bundle of the same version."""
    folder = Path(shutil.copytree(bundle, bundle.parent / name))
    return small_bundle.edited(folder, lambda m: m.update(licence="mit"))


def snapshot(server: hub_server.Server, revision: str, folder: Path) -> dict[str, bytes]:
    """Return the files that the hub's client downloads."""
    snapshot_download(
        hub_server.REPOSITORY,
        revision=revision,
        endpoint=server.endpoint,
        local_dir=folder,
        cache_dir=folder.parent / "cache",
    )
    files = contents(folder)
    return {n: data for n, data in files.items() if not n.startswith(".cache/") and n not in OURS}


def test_the_hubs_own_client_downloads_a_version_and_an_environment(
    bundle: Path, tmp_path: Path, server: hub_server.Server
) -> None:
    push(bundle, server.client(), "1")
    second = version(bundle, "2", quality(360))
    (second / "NOTICE").write_text("More to read.\n")
    manifest.write(second, json.loads((second / "manifest.json").read_bytes()))
    push(second, server.client(), "2")
    promote(server.client(), ONE, "production")
    assert snapshot(server, "1", tmp_path / "one") == contents(bundle)
    assert snapshot(server, "main", tmp_path / "main") == contents(second)
    assert snapshot(server, "production", tmp_path / "production") == contents(bundle)
    promote(server.client(), parse(f"{ONE}".replace(":1", ":2")), "production", compared=False)
    later = snapshot(server, "production", tmp_path / "later")
    assert json.loads(later.pop("environment.json"))["history"] == [
        named(server.client(), tag) for tag in "12"
    ]
    assert later == contents(second)
    rollback(server.client(), "production")
    back = snapshot(server, "production", tmp_path / "back")
    assert {n: data for n, data in back.items() if n != "environment.json"} == contents(bundle)


def test_the_model_card_has_the_figures_and_metadata_that_the_hubs_parser_reads(
    bundle: Path, server: hub_server.Server
) -> None:
    figures = {"value": 0.9, "interval": [0.85, 0.95]}
    section = quality(360, candidate=figures, verdict="pass")
    push(version(bundle, "1", section), server.client(), "1")
    files = server.repository.commits[server.repository.tags["1"]]
    card = ModelCard(files["README.md"][1].decode())
    (result,) = card.data.eval_results or []
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.9)
    assert (card.data.license, card.data.pipeline_tag) == ("apache-2.0", "sentence-similarity")
    assert {"onnx", "onnxruntime"} <= set(card.data.tags or ())
    assert "| 90.0 % (85.0 to 95.0) |" in card.text
    assert "--revision 1 --local-dir" in card.text


def test_a_tag_stays_what_it_is(bundle: Path, server: hub_server.Server) -> None:
    first = push(bundle, server.client(), "1")
    for replace in (False, True):
        with pytest.raises(RecipeError, match="names another bundle"):
            push(other(bundle, str(replace)), server.client(), "1", replace=replace)
    assert named(server.client(), "1") == first.digest


def test_of_two_that_publish_one_version_at_once_one_wins(
    bundle: Path, server: hub_server.Server
) -> None:
    folders = [bundle, other(bundle)]
    children = [killing.start(lambda f=f: push(f, server.client(), "1")) for f in folders]
    assert sorted(killing.wait(child) for child in children) == [0, 1]
    assert pull(server.client(), ONE, bundle.parent / "pulled").digest


@pytest.mark.parametrize("count", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_push_that_is_killed_leaves_what_was_there_and_the_rerun_sends_the_rest(
    bundle: Path, tmp_path: Path, server: hub_server.Server, count: int
) -> None:
    private, public = write_keys(tmp_path)
    second = version(bundle, "2", quality(360))
    sign(second, private, attachment_path(second, SIGNATURE))
    push(bundle, server.client(), "1")
    repository, large = server.repository, dict(server.large)
    saved = 0
    for number, (request, before) in enumerate(requests(32, count)):
        server.large = dict(large)
        server.repositories[hub_server.REPOSITORY] = hub_server.Repository(
            dict(repository.commits), dict(repository.branches), dict(repository.tags)
        )
        killed_at(server, request, before, lambda: push(second, server.client(), "2"))
        assert pull(server.client(), ONE, tmp_path / f"one {number}")
        there = set(server.large)
        server.log.clear()
        push(second, server.client(), "2")
        sent = {path.rpartition("/")[2] for method, path, *_ in server.log if method == "PUT"}
        assert not sent & there
        saved += len(there) > len(large)
        two = parse(f"hf://{hub_server.REPOSITORY}:2")
        pull(server.client(), two, tmp_path / f"two {number}", public)
        assert contents(tmp_path / f"two {number}") == contents(second)
    assert saved


@pytest.mark.parametrize("count", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_any_request_the_environment_names_the_old_or_the_new(
    bundle: Path, server: hub_server.Server, count: int
) -> None:
    for name in "12":
        push(version(bundle, name, quality(360)), server.client(), name)
    old, new = (named(server.client(), tag) for tag in "12")
    two = parse(f"hf://{hub_server.REPOSITORY}:2")
    promote(server.client(), ONE, "production")
    changes: tuple[Callable[[], Any], ...] = (
        lambda: promote(server.client(), two, "production"),
        lambda: rollback(server.client(), "production", of="2"),
    )
    for request, before in requests(40, count):
        for change in changes:
            killed_at(server, request, before, change)
            assert named(server.client(), "production") in (old, new)
            change()
        assert named(server.client(), "production") == old


def requests(last: int, count: int) -> list[tuple[int, bool]]:
    """(number of a request, True to kill the client before the server handles it)."""
    chosen = random.Random(0)
    return [(chosen.randrange(last), chosen.random() < 0.5) for _ in range(count)]


def killed_at(
    server: hub_server.Server, request: int, before: bool, work: Callable[[], Any]
) -> None:
    """Do the work in a child that is killed at this request, if it makes that many."""
    server.kill_at, server.kill_before = request, before
    pid = killing.start(work)
    server.victims.put(pid)
    assert killing.wait(pid) in (0, -9)
    server.kill_at = None
    while not server.victims.empty():
        server.victims.get()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_pull_resumes_after_a_broken_connection(
    bundle: Path, tmp_path: Path, server: hub_server.Server, ranges: bool
) -> None:
    push(bundle, server.client(), "1")
    place = server.client()
    assert place.read_manifest("1")
    server.cut, server.ranges = 1000, ranges
    pull(place, ONE, tmp_path / "pulled")
    assert contents(tmp_path / "pulled") == contents(bundle)
    assert server.cut is None
    resumed = [start for start in server.ranged if start]
    assert resumed == [1000]


@pytest.mark.parametrize("name", ["model/onnxruntime-cpu/model.onnx", "harness/bundle/__init__.py"])
def test_a_file_that_was_swapped_is_refused_and_nothing_appears(
    bundle: Path, tmp_path: Path, server: hub_server.Server, name: str
) -> None:
    push(bundle, server.client(), "1")
    files = server.repository.commits[server.repository.tags["1"]]
    large, data = files[name]
    for swapped in (bytes([data[0] ^ 1]) + data[1:], data + b"more", data[:-1]):
        files[name] = (large, swapped)
        if swapped == data + b"more":
            continue  # bytes beyond the manifest's size are never read
        with pytest.raises((BundleError, MachineError)):
            pull(server.client(), ONE, tmp_path / "pulled")
        assert not (tmp_path / "pulled").exists()


def test_a_repository_of_something_else_is_left_alone(
    bundle: Path, server: hub_server.Server
) -> None:
    repository = hub_server.Repository()
    repository.commit("main", {"model.safetensors": (True, b"weights")})
    server.repositories[hub_server.REPOSITORY] = repository
    with pytest.raises(RecipeError, match="other files than bundles: model"):
        push(bundle, server.client(), "1")
    assert len(repository.commits) == 1


def test_a_gitignore_there_leaves_nothing_out_unnoticed(
    bundle: Path, server: hub_server.Server
) -> None:
    server.ignored = ("report.json",)
    with pytest.raises(MachineError, match="lacks report"):
        push(bundle, server.client(), "1")
    assert server.client().tags() == []


def test_a_signature_that_comes_later_moves_no_tag(
    bundle: Path, tmp_path: Path, server: hub_server.Server
) -> None:
    private, public = write_keys(tmp_path)
    push(bundle, server.client(), "1")
    tagged = server.repository.tags["1"]
    sign(bundle, private, attachment_path(bundle, SIGNATURE))
    receipt = push(bundle, server.client(), "1")
    assert (receipt.sent, server.repository.tags["1"]) == (
        attachment_path(bundle, SIGNATURE).stat().st_size,
        tagged,
    )
    assert pull(server.client(), ONE, tmp_path / "pulled", public).attached == (".sig",)


def test_the_token_is_the_hubs_and_is_in_no_message(
    bundle: Path, server: hub_server.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = "hf_the_right_one"
    monkeypatch.setenv("HF_TOKEN", "hf_another_one")
    with pytest.raises(MachineError, match="hf auth login") as refused:
        push(bundle, server.client(), "1")
    assert "hf_another_one" not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", server.token)
    push(bundle, server.client(), "1")
    sent = {method == "PUT": authorization for method, _, _, authorization in server.log}
    assert sent == {False: "Bearer hf_the_right_one", True: ""}


def test_a_manifest_of_something_else_is_refused(
    bundle: Path, tmp_path: Path, server: hub_server.Server
) -> None:
    push(bundle, server.client(), "1")
    files = server.repository.commits[server.repository.tags["1"]]
    for data in (b"", b"[]", b"{}", b'{"files": {"../x": {"sha256": "", "size": 1}}}'):
        files[verify.MANIFEST] = (False, data)
        with pytest.raises(BundleError):
            pull(server.client(), ONE, tmp_path / "pulled")


def test_the_digest_is_that_of_any_other_registry(
    bundle: Path, tmp_path: Path, server: hub_server.Server
) -> None:
    from optimizer.publish.registries.layout import OciLayout

    layout = OciLayout(tmp_path / "layout")
    assert push(bundle, server.client(), "1").digest == push(bundle, layout, "1").digest
    place: Folders = server.client()
    data = place.read_manifest("1") or b""
    assert data == layout.read_manifest("1")
    fixed = parse(f"hf://{hub_server.REPOSITORY}@{digest_of(data)}")
    assert pull(server.client(), fixed, tmp_path / "pulled").digest == digest_of(data)


def optimize(server: hub_server.Server, *arguments: object) -> Result:
    command = [*map(str, arguments), "--hf-endpoint", server.endpoint]
    return CliRunner().invoke(main, ["--json", *command])


def test_the_commands_are_those_of_any_other_registry(
    bundle: Path, tmp_path: Path, server: hub_server.Server
) -> None:
    at = f"hf://{hub_server.REPOSITORY}"
    for name, right in (("1", 360), ("2", 320)):
        published = optimize(server, "publish", version(bundle, name, quality(right)), at)
        assert published.exit_code == 0, published.stderr
    first = json.loads(optimize(server, "promote", f"{at}:1", "--to", "production").stdout)
    assert optimize(server, "promote", f"{at}:2", "--to", "production").exit_code == 3
    skip = "--without-comparison"
    assert optimize(server, "promote", f"{at}:2", "--to", "production", skip).exit_code == 0
    listed = json.loads(optimize(server, "versions", at).stdout)["versions"]
    assert set(listed) == {"1", "2", "production"}
    assert listed["production"] == listed["2"]
    back = json.loads(optimize(server, "rollback", at, "--from", "production").stdout)
    assert back["after"] == first["after"]
    pulled = optimize(server, "pull", f"{at}:production", "--to", tmp_path / "pulled")
    assert (pulled.exit_code, first["after"] in pulled.stdout) == (0, True)


@pytest.mark.parametrize("address", ["hf://a", "hf://a/b/c", "hf://user:word@a/b", "hf://-a/b"])
def test_an_invalid_repository_is_refused(address: str) -> None:
    with pytest.raises(RecipeError):
        parse(address)
