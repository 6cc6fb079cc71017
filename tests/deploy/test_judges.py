"""Validators of other projects accept the files: kubernetes-validate, Compose, Prometheus."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimizer.deploy.dashboard import MODELS, WINDOW
from optimizer.load_test.server import run_server
from tests.deploy.conftest import deployed
from tests.publish.servers.loopback import free_port

VALIDATORS = ("kubernetes-validate==1.37.0", "check-jsonschema==0.39.0")
GIVEN = ("--memory-mib", "300", "--cpu", "2")
PROMETHEUS = shutil.which("prometheus")


@pytest.fixture(scope="module")
def validators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the validators' programs."""
    venv = tmp_path_factory.mktemp("validators")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", *VALIDATORS]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"cannot be installed here: {', '.join(VALIDATORS)}")
    return venv / "bin"


def accepted(*command: object) -> bool:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    return done.returncode == 0


@pytest.mark.slow
@pytest.mark.network
def test_validators_accept_the_files_and_not_those_with_a_typing_error(
    validators: Path, bundle: Path, tmp_path: Path
) -> None:
    scaled = ("--replicas", "2", "--max-replicas", "4", "--cpu-percent", "60")
    image = ("--image", "tiny:1", "--endpoint-seconds", "5")
    kubernetes = tmp_path / "kubernetes" / "kubernetes.yaml"
    compose = tmp_path / "compose" / "compose.yaml"
    deployed(bundle, "--to", "kubernetes", "--out", kubernetes.parent, *GIVEN, *image, *scaled)
    deployed(bundle, "--to", "compose", "--out", compose.parent, *GIVEN)
    for command, file, word in (
        ([validators / "kubernetes-validate", "-k", "1.31", "--strict"], kubernetes, "selector"),
        (
            [validators / "check-jsonschema", "--builtin-schema", "vendor.compose-spec"],
            compose,
            "services",
        ),
    ):
        assert accepted(*command, file)
        file.write_text(file.read_text().replace(f"{word}:", f"{word}z:", 1))
        assert not accepted(*command, file)


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not on the PATH")
def test_a_real_prometheus_scrapes_a_server_and_answers_every_query_of_the_dashboard(
    decoder_bundle: Path, tmp_path: Path
) -> None:
    out, port = tmp_path / "out", free_port()
    deployed(decoder_bundle, "--to", "compose", "--out", out, *GIVEN, "--drain-seconds", "9")
    board = json.loads((out / "grafana/dashboards/server.json").read_text())
    with run_server(decoder_bundle) as server:
        config = yaml.safe_load((out / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [server.url[7:]]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [str(PROMETHEUS), f"--config.file={tmp_path / 'prometheus.yml'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={tmp_path}/db"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            queries = [t["expr"] for p in board["panels"] for t in p["targets"]]
            unanswered = set(queries)
            for _ in range(60):
                completed(server.url)
                time.sleep(1)
                unanswered = {q for q in unanswered if not answer(port, q)}
                if not unanswered:
                    break
            assert unanswered == set()
        finally:
            process.terminate()
            process.wait(30)


def completed(url: str) -> None:
    body = {"model": "tiny-decoder", "prompt": "good", "max_tokens": 4}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    urllib.request.urlopen(request, timeout=30).close()


def answer(port: int, query: str) -> list[Any]:
    """Return the series of a query; none while Prometheus starts."""
    text = urllib.parse.urlencode({"query": query.replace(WINDOW, "10s").replace(MODELS, ".*")})
    try:
        url = f"http://127.0.0.1:{port}/api/v1/query?{text}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            result: list[Any] = json.load(reply)["data"]["result"]
            return result
    except urllib.error.HTTPError:  # a query that it does not understand
        raise
    except urllib.error.URLError:
        return []
