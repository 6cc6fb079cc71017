"""Ray Serve: the files, Ray's own reading of them, and two replicas of which one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.commands.command_line import parse_arguments
from tests.deploy.conftest import deployed, run
from tests.publish.servers.loopback import free_port

RAY = "ray[serve]==2.60.0"
PYTHON = os.environ.get("OPTIMIZE_TEST_RAY", "")
GIVEN = ("--memory-mib", "300", "--cpu", "1", "--replicas", "2")
TEXTS = ["good", "a good film", "bad"]
MARK = "OPTIMIZE_TEST_RAY_OF"  # environment variable of every process that a test starts
PATIENCE = {  # Ray starts slowly on a busy machine
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
}
CHECK = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
document = yaml.safe_load(open(sys.argv[1]))
ServeDeploySchema.model_validate(document)
document["applications"][0]["deployments"][0]["num_replicas"] = "two"
try:
    ServeDeploySchema.model_validate(document)
except ValueError:
    sys.exit(0)
sys.exit("num_replicas: two was accepted")
"""


def test_the_configuration_has_what_was_given_and_names_the_application(
    bundle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    deployed(bundle, "--to", "ray", "--out", out, *GIVEN, "--", "--rows", "4")
    config = yaml.safe_load((out / "serve.yaml").read_text())
    (application,) = config["applications"]
    (deployment,) = application["deployments"]
    module, _, _ = application["import_path"].partition(":")
    assert (out / f"{module}.py").is_file()
    args = parse_arguments(["serve", *application["args"]["options"]])
    assert args.rows == 4
    assert deployment["num_replicas"] == 2
    assert deployment["ray_actor_options"] == {"num_cpus": 1, "memory": 300 << 20}
    assert deployment["graceful_shutdown_timeout_s"] >= args.timeout + args.client_seconds
    assert config["http_options"]["host"] == "127.0.0.1"


def test_what_is_of_other_platforms_is_refused(bundle: Path, tmp_path: Path) -> None:
    result = run(bundle, "--to", "ray", "--out", tmp_path / "out", *GIVEN, "--image", "tiny:1")
    assert result.exit_code == 2
    assert "--image does not apply to --to ray" in result.stderr


@pytest.fixture(scope="module")
def python(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter with Ray and the bundle's requirements; OPTIMIZE_TEST_RAY may name one."""
    if PYTHON:
        return Path(PYTHON)
    venv = tmp_path_factory.mktemp("ray")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    interpreter = venv / "bin" / "python"
    needs = ["-r", str(bundle / "requirements.txt")]
    command = [str(interpreter), "-m", "pip", "install", "-q", RAY, *needs]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"cannot be installed here: {RAY}")
    return interpreter


def replicas(mark: str, but: Container[int] = ()) -> set[int]:
    """Return both replicas if there are two and one is not among `but`; else none."""
    found = processes(mark, "ServeReplica")
    return found if len(found) == 2 and any(p not in but for p in found) else set()


def processes(mark: str, name: str = "") -> set[int]:
    """Return the processes that a test started with this text in their command line."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment and name in command:
            found.add(int(folder.name))
    return found


def until(condition: Callable[[], Any], seconds: float, log: Path) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def embedded(port: int, text: str, repeated: Container[int] = range(500, 600)) -> Any:
    """Return the answer; None to ask again, as after one of these statuses."""
    body = json.dumps({"model": "tiny", "input": text}).encode()
    url = f"http://127.0.0.1:{port}/v1/embeddings"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=20) as reply:
            return json.loads(reply.read())["data"][0]["embedding"]
    except urllib.error.HTTPError as e:
        if e.code not in repeated:
            raise
    except OSError:
        pass
    return None


@pytest.fixture
def cluster(python: Path, tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Start Ray on this machine with the application in a folder; yield its log."""
    started = list[subprocess.Popen[bytes]]()
    log, mark = tmp_path / "ray.log", str(tmp_path)

    def start(out: Path) -> Path:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("COV")}
        environment |= {MARK: mark, "PYTHONPATH": str(out), "HOME": str(tmp_path)}
        environment |= {"RAY_USAGE_STATS_ENABLED": "0", **PATIENCE}
        command = [str(python.parent / "serve"), "run", str(out / "serve.yaml")]
        with log.open("w") as file:
            started.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        return log

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    for left in processes(mark):
        os.kill(left, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.network
def test_a_replica_that_is_killed_under_load_costs_no_answer_and_comes_back(
    cluster: Callable[[Path], Path], python: Path, bundle: Path, tmp_path: Path
) -> None:
    out, port, mark = tmp_path / "out", free_port(), str(tmp_path)
    deployed(bundle, "--to", "ray", "--out", out, *GIVEN)
    subprocess.run([str(python), "-c", CHECK, str(out / "serve.yaml")], check=True)
    config = yaml.safe_load((out / "serve.yaml").read_text())
    config["http_options"]["port"] = port
    (out / "serve.yaml").write_text(yaml.safe_dump(config))
    with Bundle(bundle) as opened:
        expected = {t: opened.predict([t])[0]["embedding"] for t in TEXTS}
    log = cluster(out)
    until(lambda: embedded(port, "good", (404, 503)), 240, log)  # 404: no application yet
    first = until(lambda: replicas(mark), 60, log)
    answers, ended = list[tuple[str, Any]](), threading.Event()

    def ask(text: str) -> None:
        while not ended.is_set():
            answers.append((text, until(lambda: embedded(port, text), 120, log)))

    clients = [threading.Thread(target=ask, args=(text,)) for text in TEXTS]
    for client in clients:
        client.start()
    until(lambda: len(answers) > 20, 60, log)
    os.kill(min(first), signal.SIGKILL)
    before = len(answers)
    second = until(lambda: replicas(mark, but=first), 120, log)
    until(lambda: len(answers) > before + 20, 60, log)
    ended.set()
    for client in clients:
        client.join()
    assert max(first) in second  # the other was never replaced
    assert all(answer == expected[text] for text, answer in answers)
