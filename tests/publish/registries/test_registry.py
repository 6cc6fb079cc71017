"""Tests of publish and pull: equal bytes, nothing sent twice, swapped content refused."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.foundation.buckets.blob import digest_of
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.harness.errors import BundleError
from optimizer.publish.address import BundleAddress, parse
from optimizer.publish.attachments import SIGNATURE, attachment_path
from optimizer.publish.documents.attest import attest
from optimizer.publish.documents.sign import sign
from optimizer.publish.hubs.folders import Folders
from optimizer.publish.pull import pull
from optimizer.publish.push import push
from optimizer.publish.registries.layout import OciLayout
from optimizer.publish.registries.place import Place
from optimizer.publish.registries.places import make_place
from tests import killing
from tests.package.bundles import small_bundle
from tests.publish.servers import hub_server, oci_server, s3_server
from tests.publish.servers.keys import write_keys
from tests.publish.servers.loopback import free_port, program

REGISTRY, SKOPEO = shutil.which("docker-registry"), shutil.which("skopeo")


@pytest.fixture
def server() -> Iterator[oci_server.Server]:
    with oci_server.serving() as running:
        yield running


def address(server: oci_server.Server, tag: str = "1", digest: str = "") -> BundleAddress:
    return BundleAddress(tag, digest, host=server.host, name="models/tiny")


def registry(server: oci_server.Server, docker: Path = Path("/nonexistent")) -> Place:
    return server.client(docker)


@contextmanager
def places(kind: str, folder: Path) -> Iterator[tuple[Place | Folders, BundleAddress]]:
    """Yield a registry in this process without and with a referrers API, a layout, a model hub, an
    object store, and Debian's registry."""
    if kind == "layout":
        at = BundleAddress("1", "", folder=folder / "layout")
        yield make_place(at, folder), at
    elif kind == "hub":
        with hub_server.serving() as hub:
            yield hub.client(), parse(f"hf://{hub_server.REPOSITORY}:1")
    elif kind == "s3":
        with s3_server.serving() as store:
            yield store.client(), parse("s3://releases/models/tiny:1")
    elif kind == "docker-registry":
        with docker_registry(folder) as host:
            at = BundleAddress("1", "", host=host, name="models/tiny")
            with closing(make_place(at, folder)) as place:
                yield place, at
    else:
        with oci_server.serving() as server:
            server.has_referrers = kind == "referrers"
            yield registry(server), address(server)


@contextmanager
def docker_registry(folder: Path) -> Iterator[str]:
    port = free_port()
    settings = folder / "registry.yml"
    settings.write_text(
        f"{{version: 0.1, storage: {{filesystem: {{rootdirectory: {folder / 'registry'}}}}}, "
        f'http: {{addr: "127.0.0.1:{port}"}}, log: {{level: error}}}}'
    )
    assert REGISTRY is not None
    with program([REGISTRY, "serve", settings], port, folder / "registry.log"):
        yield f"127.0.0.1:{port}"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


DEBIAN = pytest.param(
    "docker-registry",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(REGISTRY is None, reason="docker-registry is not on the PATH"),
    ],
)


@pytest.mark.parametrize("kind", ["fallback", "referrers", "layout", "hub", s3_server.KIND, DEBIAN])
def test_what_is_pulled_is_what_was_published_with_what_lies_beside_it(
    bundle: Path, tmp_path: Path, kind: str
) -> None:
    private, public = write_keys(tmp_path)
    sign(bundle, private, attachment_path(bundle, SIGNATURE))
    attest(bundle)
    with places(kind, tmp_path) as (place, at):
        receipt = push(bundle, place, "1")
        again = push(bundle, place, "1")
        pulled = pull(place, at, tmp_path / "pulled", public)
        assert (place.tags(), receipt.digest) == (["1"], pulled.digest)
    assert (again.sent, again.digest) == (0, receipt.digest)
    assert contents(tmp_path / "pulled") == contents(bundle)
    for suffix in (".sig", ".sbom.json", ".provenance.json"):
        published, fetched = (tmp_path / f"{n}{suffix}" for n in ("bundle", "pulled"))
        assert published.read_bytes() == fetched.read_bytes()
    assert pulled.attached == (".sig", ".sbom.json", ".provenance.json")


@pytest.mark.parametrize("kind", ["fallback", "layout", "hub", s3_server.KIND, DEBIAN])
def test_two_bundles_that_differ_in_one_file_share_all_others(
    bundle: Path, tmp_path: Path, kind: str
) -> None:
    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    (other / "LICENSE").write_text("Do something else.\n")
    from optimizer.package import manifest

    document = json.loads((other / "manifest.json").read_bytes())
    manifest.write(other, {**document, "version": "2"})
    with places(kind, tmp_path) as (place, _):
        push(bundle, place, "1")
        receipt = push(other, place, "2")
    changed = sum((other / n).stat().st_size for n in ("LICENSE", "manifest.json"))
    config = 2000
    assert changed <= receipt.sent < changed + 10 * config
    assert receipt.shared > receipt.sent


@pytest.mark.slow
@pytest.mark.skipif(REGISTRY is None or SKOPEO is None, reason="docker-registry, skopeo: not here")
def test_another_client_carries_it_and_it_is_the_same(bundle: Path, tmp_path: Path) -> None:
    with docker_registry(tmp_path) as host:
        with closing(make_place(parse(f"oci://{host}/tiny:1"), tmp_path)) as place:
            push(bundle, place, "1")
        command: list[Any] = [SKOPEO, "copy", "--src-tls-verify=false", f"docker://{host}/tiny:1"]
        command += ["--insecure-policy", f"oci:{tmp_path / 'layout'}:1"]
        subprocess.run(command, check=True, capture_output=True)
        layout = parse(f"oci-layout:{tmp_path / 'layout'}:1")
        pull(make_place(layout, tmp_path), layout, tmp_path / "one")
        push(bundle, make_place(layout, tmp_path), "2")
        command = [SKOPEO, "copy", "--dest-tls-verify=false", "--insecure-policy"]
        command += [f"oci:{tmp_path / 'layout'}:2", f"docker://{host}/other:2"]
        subprocess.run(command, check=True, capture_output=True)
        back = parse(f"oci://{host}/other:2")
        with closing(make_place(back, tmp_path)) as place:
            pull(place, back, tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(bundle)


def test_the_manifest_is_a_model_pack_of_raw_files(bundle: Path, server: oci_server.Server) -> None:
    receipt = push(bundle, registry(server), "1")
    kind, data = server.manifests["1"]
    manifest = json.loads(data)
    assert (kind, digest_of(data)) == (manifest["mediaType"], receipt.digest)
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    types = {
        layer["annotations"]["org.cncf.model.filepath"]: layer["mediaType"].split(".")[3:-2]
        for layer in manifest["layers"]
    }
    assert set(types) == set(contents(bundle))
    assert types["model/onnxruntime-cpu/model.onnx"] == ["weight"]
    assert types["tokenizer/tokenizer.json"] == types["manifest.json"] == ["weight", "config"]
    assert (types["LICENSE"], types["verify.py"]) == (["doc"], ["code"])
    config = json.loads(server.blobs[manifest["config"]["digest"]])
    assert set(config) == {"descriptor", "config", "modelfs"}
    assert config["config"]["precision"] == "int8"
    assert config["modelfs"]["diffIds"] == [layer["digest"] for layer in manifest["layers"]]


def test_a_tag_that_names_another_bundle_moves_only_when_it_may(
    bundle: Path, tmp_path: Path, server: oci_server.Server
) -> None:
    push(bundle, registry(server), "1")
    small_bundle.edited(bundle, lambda m: m.update(licence="mit"))
    with pytest.raises(RecipeError, match="names another bundle"):
        push(bundle, registry(server), "1")
    receipt = push(bundle, registry(server), "1", replace=True)
    assert digest_of(server.manifests["1"][1]) == receipt.digest


def test_a_layer_that_was_swapped_is_refused_and_nothing_appears(
    bundle: Path, tmp_path: Path, server: oci_server.Server
) -> None:
    push(bundle, registry(server), "1")
    for digest, data in list(server.blobs.items()):
        if len(data) < 2 or json.dumps(digest) not in server.manifests["1"][1].decode():
            continue
        if f'"digest":"{digest}","mediaType":"application/vnd.cncf.model.config' in (
            server.manifests["1"][1].decode()
        ):
            continue  # the config, not a file of the bundle
        for swapped in (bytes([data[0] ^ 1]) + data[1:], data + b"more", data[:-1]):
            server.blobs[digest] = swapped
            with pytest.raises((BundleError, MachineError)):
                pull(registry(server), address(server), tmp_path / "pulled")
            assert not (tmp_path / "pulled").exists()
        server.blobs[digest] = data
        break
    pull(registry(server), address(server), tmp_path / "pulled")


def test_a_moved_tag_does_not_change_a_pull_by_digest(
    bundle: Path, tmp_path: Path, server: oci_server.Server
) -> None:
    first = push(bundle, registry(server), "1")
    before = contents(bundle)
    small_bundle.edited(bundle, lambda m: m.update(licence="mit"))
    push(bundle, registry(server), "1", replace=True)
    pulled = pull(registry(server), address(server, "1", first.digest), tmp_path / "pulled")
    assert (pulled.digest, contents(tmp_path / "pulled")) == (first.digest, before)


def test_a_registry_that_answers_a_digest_with_another_manifest_is_refused(
    bundle: Path, tmp_path: Path, server: oci_server.Server
) -> None:
    first = push(bundle, registry(server), "1")
    small_bundle.edited(bundle, lambda m: m.update(licence="mit"))
    second = push(bundle, registry(server), "2")
    server.manifests[first.digest] = server.manifests[second.digest]
    with pytest.raises(BundleError, match="get the bundle elsewhere"):
        pull(registry(server), address(server, "1", first.digest), tmp_path / "pulled")


@pytest.mark.parametrize("why", ["stripped", "another key", "stale"])
def test_a_pull_that_requires_a_signature_brings_nothing_without_it(
    bundle: Path, tmp_path: Path, server: oci_server.Server, why: str
) -> None:
    private, public = write_keys(tmp_path)
    if why != "stripped":
        sign(bundle, private, attachment_path(bundle, SIGNATURE))
    push(bundle, registry(server), "1")
    if why == "another key":
        _, public = write_keys(tmp_path, "other")
    if why == "stale":  # the signature of one bundle under the tag of another
        old = digest_of(server.manifests["1"][1])
        attachment_path(bundle, SIGNATURE).unlink()
        small_bundle.edited(bundle, lambda m: m.update(licence="mit"))
        receipt = push(bundle, registry(server), "1", replace=True)
        tags = (digest.replace(":", "-") for digest in (receipt.digest, old))
        server.manifests.update({next(tags): server.manifests[next(tags)]})
    with pytest.raises(BundleError, match=r"signature|signed"):
        pull(registry(server), address(server), tmp_path / "pulled", public)
    assert not (tmp_path / "pulled").exists()


def test_a_tag_that_was_set_back_to_an_older_signed_version_is_refused(
    bundle: Path, tmp_path: Path, server: oci_server.Server
) -> None:
    private, public = write_keys(tmp_path)
    sign(bundle, private, attachment_path(bundle, SIGNATURE))
    push(bundle, registry(server), "2")
    with pytest.raises(BundleError, match="version 1, older than 2"):
        pull(registry(server), address(server, "2"), tmp_path / "pulled", public, "2")
    assert not (tmp_path / "pulled").exists()
    pull(registry(server), address(server, "2"), tmp_path / "pulled", public, "1")


def test_what_was_pulled_answers_by_its_own_harness(whole_bundle: Path, tmp_path: Path) -> None:
    layout = BundleAddress("1", "", folder=tmp_path / "layout")
    push(whole_bundle, make_place(layout, tmp_path), "1")
    folder = pull(make_place(layout, tmp_path), layout, tmp_path / "pulled").folder
    here, there = (
        small_bundle.python(at, "-m", "harness", "predict", "--json", "a good film")
        for at in (whole_bundle, folder)
    )
    assert (there.returncode, there.stdout) == (0, here.stdout)


def test_of_two_signatures_the_one_of_the_key_counts(
    bundle: Path, tmp_path: Path, server: oci_server.Server
) -> None:
    for name in ("one", "two", "three"):
        private, _ = write_keys(tmp_path, name)
        sign(bundle, private, attachment_path(bundle, SIGNATURE))
        push(bundle, registry(server), "1")
    pulled = pull(registry(server), address(server), tmp_path / "pulled", tmp_path / "two.pub")
    checked = optimize("check", pulled.folder, "--require-signature", tmp_path / "two.pub")
    assert checked.exit_code == 0, checked.stderr


def test_a_signature_of_another_folder_is_not_published(
    bundle: Path, tmp_path: Path, server: oci_server.Server
) -> None:
    private, _ = write_keys(tmp_path)
    sign(bundle, private, attachment_path(bundle, SIGNATURE))
    attest(bundle)
    small_bundle.edited(bundle, lambda m: m.update(licence="mit"))
    for attachment in (".sig", ".sbom.json", ".provenance.json"):
        with pytest.raises(BundleError, match="belongs to another bundle") as refused:
            push(bundle, registry(server), "1")
        assert refused.value.where.endswith(attachment)
        Path(refused.value.where).unlink()
    assert server.manifests == {}


def test_a_damaged_bundle_is_not_published(bundle: Path, server: oci_server.Server) -> None:
    (bundle / "LICENSE").write_text("Changed.\n")
    with pytest.raises(BundleError, match="LICENSE"):
        push(bundle, registry(server), "1")
    assert (server.manifests, server.blobs) == ({}, {})


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another type": lambda m: m.update(artifactType="application/x"),
    "no layers": lambda m: m.update(layers=[]),
    "no list": lambda m: m.update(layers={}),
    "a name that leaves": lambda m: _title(m, "../x"),
    "an absolute name": lambda m: _title(m, "/x"),
    "a name that comes twice": lambda m: m["layers"].append(m["layers"][0]),
    "a file that is a folder": lambda m: _title(m, "harness"),
    "a digest that is none": lambda m: m["layers"][0].update(digest="md5:00"),
    "a size that is none": lambda m: m["layers"][0].update(size=-1),
    "no manifest.json": lambda m: m.update(
        layers=[x for x in m["layers"] if x["annotations"][TITLE] != "manifest.json"]
    ),
    "one file fewer": lambda m: m["layers"].pop(0),
}
TITLE = "org.opencontainers.image.title"


def _title(manifest: dict[str, Any], name: str) -> None:
    manifest["layers"][0]["annotations"][TITLE] = name


@pytest.mark.parametrize("change", MANIFESTS)
def test_a_manifest_of_something_else_is_refused(
    bundle: Path, tmp_path: Path, server: oci_server.Server, change: str
) -> None:
    push(bundle, registry(server), "1")
    kind, data = server.manifests["1"]
    manifest = json.loads(data)
    MANIFESTS[change](manifest)
    server.manifests["1"] = (kind, json.dumps(manifest).encode())
    with pytest.raises(BundleError):
        pull(registry(server), address(server), tmp_path / "a" / "pulled")
    assert {p.name for p in tmp_path.iterdir()} <= {"a", "bundle"}
    assert not (tmp_path / "a" / "pulled").exists()


def test_a_pull_resumes_after_a_broken_connection(
    bundle: Path, tmp_path: Path, server: oci_server.Server
) -> None:
    push(bundle, registry(server), "1")
    server.cut = 100
    pull(registry(server), address(server), tmp_path / "pulled")
    assert contents(tmp_path / "pulled") == contents(bundle)
    server.cut, server.ranges = 100, False
    pull(registry(server), address(server), tmp_path / "whole")
    assert contents(tmp_path / "whole") == contents(bundle)


def test_a_server_that_is_busy_is_asked_again(bundle: Path, server: oci_server.Server) -> None:
    waited: list[float] = []
    place: Any = registry(server)
    place.transport.sleep = waited.append
    server.failures = 2
    push(bundle, place, "1")
    assert (waited, "1" in server.manifests) == ([0.5, 1.0], True)
    server.failures = 10
    with pytest.raises(MachineError, match="503"):
        push(bundle, place, "1")


def log_in(folder: Path, host: str) -> Path:
    """Write docker's config.json for the host."""
    pair = base64.b64encode(f"{oci_server.USER}:{oci_server.PASSWORD}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": pair}}}))
    return folder


@pytest.mark.parametrize("kind", ["Basic", "Bearer"])
def test_credentials_are_dockers_and_reach_no_other_host_nor_a_message(
    bundle: Path, tmp_path: Path, server: oci_server.Server, kind: str
) -> None:
    server.authorization = kind
    with pytest.raises(MachineError, match="docker login") as refused:
        push(bundle, registry(server), "1")
    docker = log_in(tmp_path, server.host)
    push(bundle, registry(server, docker), "1")
    with oci_server.serving() as elsewhere:
        elsewhere.blobs = server.blobs
        server.blobs_at = f"http://{elsewhere.host}"
        pull(registry(server, docker), address(server), tmp_path / "pulled")
        assert {authorization for *_, authorization in elsewhere.log} == {""}
    server.authorization = ""
    assert oci_server.PASSWORD not in str(refused.value)
    assert contents(tmp_path / "pulled") == contents(bundle)


def test_a_wrong_password_is_not_shown(bundle: Path, tmp_path: Path) -> None:
    with oci_server.serving() as server:
        server.authorization = "Basic"
        pair = base64.b64encode(b"user:hunter2-hunter2").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {server.host: {"auth": pair}}}))
        result = optimize(
            *("--json", "publish", bundle, f"oci://{server.host}/x"),
            *("--docker-config", tmp_path),
        )
    assert (result.exit_code, "docker login" in result.stdout) == (5, True)
    assert "hunter2" not in result.output
    assert pair not in result.output


def test_a_registry_that_is_not_there_is_the_machines_fault(bundle: Path) -> None:
    host = f"127.0.0.1:{free_port()}"
    result = optimize("--json", "publish", bundle, f"oci://{host}/x:1")
    assert (result.exit_code, host in json.loads(result.stdout)["where"]) == (5, True)


def optimize(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_the_commands_publish_list_and_pull(bundle: Path, tmp_path: Path) -> None:
    layout = f"oci-layout:{tmp_path / 'layout'}"
    published = json.loads(optimize("--json", "publish", bundle, layout).stdout)
    listed = json.loads(optimize("--json", "versions", layout).stdout)
    pulled = json.loads(
        optimize("--json", "pull", published["address"], "--to", tmp_path / "pulled").stdout
    )
    assert listed["versions"] == {"1": published["digest"]} == {"1": pulled["digest"]}
    assert optimize("check", tmp_path / "pulled").exit_code == 0


def test_a_pull_without_a_folder_goes_to_artifacts_name_version(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = f"oci-layout:{tmp_path / 'layout'}"
    optimize("publish", bundle, layout)
    monkeypatch.chdir(tmp_path)
    assert optimize("pull", f"{layout}:1").exit_code == 0
    assert contents(tmp_path / "artifacts/tiny/1") == contents(bundle)


def test_a_version_that_is_not_there_is_named_beside_those_that_are(
    bundle: Path, tmp_path: Path
) -> None:
    layout = f"oci-layout:{tmp_path / 'layout'}"
    optimize("publish", bundle, f"{layout}:1.0")
    result = optimize("pull", f"{layout}:1.1", "--to", tmp_path / "x")
    assert (result.exit_code, 'did you mean "1.0"?' in result.stderr) == (2, True)
    assert "Accepted: 1.0" in optimize("pull", layout, "--to", tmp_path / "x").stderr


def test_a_folder_that_is_something_else_is_not_replaced(bundle: Path, tmp_path: Path) -> None:
    layout = f"oci-layout:{tmp_path / 'layout'}"
    optimize("publish", bundle, layout)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    result = optimize("pull", f"{layout}:1", "--to", tmp_path / "mine")
    assert (result.exit_code, "not replaced" in result.stderr) == (2, True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "kept"


@pytest.mark.parametrize(
    "text",
    [
        "minilm:1",
        "oci://",
        "oci://host",
        "oci://host/Big",
        "oci://host/x:",
        "oci://user:password@host/x:1",
        "oci://host/x@sha256:12",
        "oci://host/../x",
        "oci-layout:",
        "https://host/x",
    ],
)
def test_an_invalid_address_is_refused_and_a_password_is_not_repeated(text: str) -> None:
    with pytest.raises(RecipeError) as refused:
        parse(text)
    assert "password@" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "oci://localhost:5000/a/b.c:1.0",
        "oci://[::1]:5000/a",
        f"oci://h.example/x:1@sha256:{'0' * 64}",
        "oci-layout:/srv/a b:2",
        "oci-layout:rel/folder",
    ],
)
def test_an_address_is_written_as_it_is_read(text: str) -> None:
    assert str(parse(text)) == text


def test_a_file_address_is_a_layout() -> None:
    assert parse("file:///srv/releases/tiny:1") == parse("oci-layout:/srv/releases/tiny:1")
    with pytest.raises(RecipeError):
        parse("file://host/x")


def test_a_folder_that_is_not_a_layout_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match="not an OCI layout"):
        OciLayout(tmp_path)


def test_a_file_is_not_a_layout(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match="not an OCI layout"):
        OciLayout(tmp_path / "file")


def test_writers_at_once_lose_nothing(bundle: Path, tmp_path: Path) -> None:
    layout = OciLayout(tmp_path / "layout")
    tags = [f"t{i}" for i in range(4)]
    works = [lambda tag=tag: push(bundle, layout, tag) for tag in tags]
    children = [killing.start(work) for work in works]
    assert [killing.wait(child) for child in children] == [0] * len(tags)
    assert layout.tags() == tags
    kinds = [
        e["artifactType"] for e in layout.referrers(digest_of(layout.read_manifest("t0") or b""))
    ]
    assert kinds == ["text/html"]  # the report, once


def test_an_index_of_referrers_keeps_what_others_wrote(tmp_path: Path, bundle: Path) -> None:
    layout = OciLayout(tmp_path / "layout")
    for name in ("one", "two"):
        private, _ = write_keys(tmp_path, name)
        sign(bundle, private, attachment_path(bundle, SIGNATURE))
        digest = push(bundle, layout, "1").digest
    kinds = [e["artifactType"] for e in layout.referrers(digest)]
    assert kinds.count(SIGNATURE.media_type) == 2
    for file in (tmp_path / "layout" / "blobs" / "sha256").iterdir():
        assert re.fullmatch("[0-9a-f]{64}", file.name)
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.name
