"""Tests with a real MLflow server: publish, promote, load and roll back, killed and in parallel.

They need `mlflow` on the PATH, possibly from another environment:
python -m venv V; V/bin/pip install mlflow==3.17.2 tokenizers onnxruntime filelock; PATH=V/bin:$PATH
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from optimizer.publish.attachments import SIGNATURE, attachment_path
from optimizer.publish.documents.sign import sign
from tests.package.bundles import small_bundle
from tests.publish.environments.test_environments import quality, version
from tests.publish.registries.test_registry import contents
from tests.publish.servers.keys import write_keys

MLFLOW = shutil.which("mlflow")
ROOT = Path(__file__).parents[3]
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        MLFLOW is None,
        reason="mlflow is not on the PATH: python -m venv V; V/bin/pip install mlflow==3.17.2 "
        "tokenizers onnxruntime filelock; PATH=V/bin:$PATH",
    ),
]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server and return its URL."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(MLFLOW), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environment = {**os.environ, **QUIET}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            with suppress(OSError):
                urlopen(f"{address}/health").close()
                break
            time.sleep(1)
        yield address
    finally:
        os.killpg(server.pid, 9)
        server.wait()


class Client:
    """Run commands in the environment that has MLflow."""

    def __init__(self, uri: str) -> None:
        assert MLFLOW is not None
        self.python = str(Path(MLFLOW).with_name("python"))
        self.environment = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
        self.environment["MLFLOW_TRACKING_URI"] = uri
        self.process = subprocess.Popen(
            [self.python, "-m", "tests.publish.servers.mlflow_client"],
            env=self.environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, *arguments: object, kill_at: int | None = None) -> None:
        job = {"arguments": ["--json", *map(str, arguments)], "kill_at": kill_at}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, dict[str, Any]]:
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline())
        return answer["exit"], json.loads(answer["stdout"] or "{}")

    def run(self, *arguments: object, kill_at: int | None = None) -> tuple[int, dict[str, Any]]:
        """Return the exit code, or -9, and the document that the command printed."""
        self.begin(*arguments, kill_at=kill_at)
        return self.end()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture
def client(uri: str) -> Iterator[Client]:
    running = Client(uri)
    yield running
    running.close()


def get(uri: str, path: str) -> Any:
    """Return an answer of the server's REST API."""
    with urlopen(f"{uri}/api/2.0/mlflow/{path}") as answer:
        return json.loads(answer.read())


def test_a_release_goes_forward_and_back_as_in_any_other_registry(
    whole_bundle: Path, tmp_path: Path, uri: str, client: Client
) -> None:
    private, public = write_keys(tmp_path)
    folders = [version(whole_bundle, name, quality(360)) for name in "12"]
    for folder in folders:
        sign(folder, private, attachment_path(folder, SIGNATURE))
        assert client.run("publish", folder, "mlflow:release")[0] == 0
    again = client.run("publish", folders[0], "mlflow:release")[1]
    assert (again["sent"], again["shared"] > 400_000) == (0, True)
    for tag in "12":
        code, _ = client.run(
            *("promote", f"mlflow:release:{tag}", "--to", "production"),
            *("--require-signature", public),
        )
        assert code == 0
    listed = client.run("versions", f"mlflow:{uri}#release")[1]["versions"]
    assert (set(listed), listed["production"]) == ({"1", "2", "production"}, listed["2"])
    code, back = client.run("rollback", "mlflow:release", "--from", "production")
    assert (code, back["after"]) == (0, listed["1"])
    into = tmp_path / "pulled"
    pulled = ("pull", "mlflow:release:production", "--to", into, "--require-signature", public)
    assert client.run(*pulled)[1]["digest"] == listed["1"]
    assert contents(into) == contents(folders[0])
    other = version(folders[0], "1 again", quality(380))
    other = small_bundle.edited(other, lambda m: m.update(version="1"))
    assert client.run("publish", other, "mlflow:release")[0] == 2
    assert client.run("publish", other, "mlflow:release", "--replace")[0] == 0
    replaced = client.run("versions", "mlflow:release")[1]["versions"]
    assert replaced["1"] not in (listed["1"], listed["2"])
    assert replaced["production"] == listed["1"]


def test_the_server_has_figures_recipe_report_and_a_model_that_answers(
    whole_bundle: Path, uri: str, client: Client
) -> None:
    folder = version(whole_bundle, "1", quality(360))
    assert client.run("publish", folder, "mlflow:answers")[0] == 0
    assert client.run("promote", "mlflow:answers:1", "--to", "production")[0] == 0
    model = get(uri, "registered-models/get?name=answers")["registered_model"]
    assert model["aliases"] == [{"alias": "production", "version": "1"}]
    run = model["latest_versions"][0]["run_id"]
    data = get(uri, f"runs/get?run_id={run}")["run"]["data"]
    metrics = {m["key"]: m["value"] for m in data["metrics"]}
    assert metrics["onnxruntime-cpu/accuracy"] == 0.9
    assert {"key": "quantize.weights.bits", "value": "8"} in data["params"]
    artifacts = {f["path"] for f in get(uri, f"artifacts/list?run_id={run}")["files"]}
    assert {"report.html", "model"} <= artifacts
    code = (
        "import json, mlflow, pandas\n"
        "model = mlflow.pyfunc.load_model('models:/answers@production')\n"
        "texts = pandas.DataFrame({'text': ['a good film', 'a bad one']})\n"
        "print(json.dumps(model.predict(texts)))\n"
    )
    answered = subprocess.run(
        [client.python, "-c", code], env=client.environment, capture_output=True, text=True
    )
    texts = ("a good film", "a bad one")
    own = small_bundle.python(whole_bundle, "-m", "harness", "predict", "--json", *texts).stdout
    expected = [json.loads(line)["embedding"] for line in own.splitlines()]
    assert answered.returncode == 0, answered.stderr
    for answer, embedding in zip(json.loads(answered.stdout), expected, strict=True):
        assert answer["embedding"] == pytest.approx(embedding, abs=1e-5)


def test_a_publish_that_is_killed_leaves_no_half_and_the_rerun_sends_the_rest(
    whole_bundle: Path, tmp_path: Path, client: Client
) -> None:
    old, new = version(whole_bundle, "1", None), version(whole_bundle, "2", None)
    chosen = random.Random(0)
    resumed = 0
    for number in range(4):
        address = f"mlflow:killed-{number}"
        assert client.run("publish", old, address)[0] == 0
        assert client.run("publish", new, address, kill_at=chosen.randrange(350))[0] in (0, -9)
        for tag in client.run("versions", address)[1]["versions"]:
            into = tmp_path / f"{number}-{tag}"
            assert client.run("pull", f"{address}:{tag}", "--to", into)[0] == 0
            assert contents(into) == contents(old if tag == "1" else new)
        code, receipt = client.run("publish", new, address)
        assert code == 0
        resumed += receipt["shared"] > 0
        into = tmp_path / f"{number} after"
        assert client.run("pull", f"{address}:2", "--to", into)[0] == 0
        assert contents(into) == contents(new)
    assert resumed


def test_killed_at_any_request_the_alias_names_the_old_or_the_new(
    whole_bundle: Path, client: Client
) -> None:
    for name in "12":
        folder = version(whole_bundle, name, quality(360))
        assert client.run("publish", folder, "mlflow:moved")[0] == 0
    listed = client.run("versions", "mlflow:moved")[1]["versions"]
    assert client.run("promote", "mlflow:moved:1", "--to", "production")[0] == 0
    chosen = random.Random(1)
    changes = (
        ("promote", "mlflow:moved:2", "--to", "production"),
        ("rollback", "mlflow:moved", "--from", "production", "--of", "2"),
    )
    for _ in range(6):
        for change in changes:
            assert client.run(*change, kill_at=chosen.randrange(80))[0] in (0, -9)
            now = client.run("versions", "mlflow:moved")[1]["versions"]["production"]
            assert now in (listed["1"], listed["2"])
            assert client.run(*change)[0] == 0
        now = client.run("versions", "mlflow:moved")[1]["versions"]["production"]
        assert now == listed["1"]


def test_of_two_that_publish_one_version_at_once_one_wins_at_most(
    whole_bundle: Path, tmp_path: Path, uri: str
) -> None:
    one = version(whole_bundle, "1", None)
    other = Path(shutil.copytree(one, tmp_path / "other"))
    small_bundle.edited(other, lambda m: m.update(licence="mit"))
    folders = [one, other]
    with closing(Client(uri)) as first, closing(Client(uri)) as second:
        for client, folder in ((first, one), (second, other)):
            client.begin("publish", folder, "mlflow:at-once")
        exits = [client.end()[0] for client in (first, second)]
        assert exits.count(0) <= 1
        again = [first.run("publish", folder, "mlflow:at-once")[0] for folder in folders]
        assert again.count(0) == 1
        into = tmp_path / "pulled"
        assert first.run("pull", "mlflow:at-once:1", "--to", into)[0] == 0
    assert contents(into) == contents(folders[again.index(0)])


def test_a_server_that_does_not_answer_is_named(
    tmp_path: Path, whole_bundle: Path, uri: str
) -> None:
    client = Client("http://user:secret@127.0.0.1:1")
    client.environment["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    client.close()
    command = [client.python, "-m", "optimizer", "publish", str(whole_bundle), "mlflow:x"]
    refused = subprocess.run(
        command, env=client.environment, cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode == 5
    assert "mlflow:x" in refused.stderr
    assert "secret" not in refused.stderr
