"""A real Triton serves a repository with the answers of predict."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.bundle.bundle import Bundle
from tests.deploy.conftest import deployed
from tests.publish.servers.loopback import free_port

TRITON = "nvidia-pytriton==0.7.0"  # holds a server and its python backend
PYTHON = os.environ.get("OPTIMIZE_TEST_TRITON", "")
TEXTS = ["good", "a good film", "bad " * 40, "good"]


@pytest.fixture(scope="module")
def python(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter with Triton and the bundle's requirements; OPTIMIZE_TEST_TRITON may name one."""
    if PYTHON:
        return Path(PYTHON)
    venv = tmp_path_factory.mktemp("triton")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    interpreter = venv / "bin" / "python"
    needs = ["-r", str(bundle / "requirements.txt")]
    for words in (["--no-deps", TRITON], needs, ["numpy<2"]):  # this Triton was built for numpy 1
        command = [str(interpreter), "-m", "pip", "install", "-q", *words]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"cannot be installed here: {words[-1]}")
    return interpreter


def asked(port: int, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read() or b"{}")


def inferred(port: int, model: str, texts: list[str], **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}
    body = {"inputs": [tensor], "parameters": parameters}
    answer = asked(port, f"v2/models/{model}/infer", body)
    return {o["name"]: np.array(o["data"]).reshape(o["shape"]) for o in answer["outputs"]}


@pytest.fixture
def server(python: Path, tmp_path: Path) -> Iterator[Any]:
    """Start Triton on a repository; yield its port."""
    processes = []
    packages = Path(next(iter((python.parent.parent / "lib").glob("python3*")))) / "site-packages"
    triton, backends = packages / "pytriton" / "tritonserver", tmp_path / "backends"
    shutil.copytree(triton / "backends" / "python", backends / "python")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for file in (triton / "python_backend_stubs" / version).iterdir():
        shutil.copy(file, backends / "python")

    def start(repository: Path) -> int:
        ports = [str(free_port()) for _ in range(3)]
        options = [f"--model-repository={repository}", f"--backend-directory={backends}"]
        for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True):
            options += [f"--{kind}-port", port]
            options += [f"--{kind}-address", "127.0.0.1"]
        log = tmp_path / "triton.log"
        libraries = f"{sysconfig.get_config_var('LIBDIR')}:{packages / 'nvidia_pytriton.libs'}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
        environment |= {"LD_LIBRARY_PATH": libraries, "VIRTUAL_ENV": str(python.parent.parent)}
        environment["PATH"] = f"{python.parent}:{environment['PATH']}"
        environment["PYTHONPATH"] = str(packages)
        command = [str(triton / "bin" / "tritonserver"), *options]
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        for _ in range(600):
            try:
                asked(int(ports[0]), "v2/health/ready")
                return int(ports[0])
            except OSError:
                assert processes[-1].poll() is None, log.read_text()[-3000:]
                time.sleep(0.2)
        raise AssertionError(log.read_text()[-3000:])

    yield start
    for process in processes:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
@pytest.mark.network
def test_triton_answers_as_predict_does(
    server: Any, bundle: Path, decoder_bundle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    deployed(bundle, "--to", "triton", "--out", out)
    deployed(decoder_bundle, "--to", "triton", "--out", tmp_path / "decoder")
    shutil.move(tmp_path / "decoder/models/tiny-decoder", out / "models/tiny-decoder")
    port = server(out / "models")
    with Bundle(bundle) as opened:
        expected = np.array([opened.predict([t])[0]["embedding"] for t in TEXTS], np.float32)
    for texts, rows in ((TEXTS, expected), (TEXTS[1:2], expected[1:2])):
        answer = inferred(port, "tiny", texts)
        assert np.array_equal(answer["embedding"].astype(np.float32), rows)
        answers = [json.loads(a)["embedding"] for a in answer["answer"].ravel()]
        assert np.array_equal(np.array(answers, np.float32), rows)
    with Bundle(decoder_bundle) as opened:
        from optimizer.harness.generate import Options

        completion = opened.generate(["good"], Options(max_new_tokens=4))[0]
    continued = inferred(port, "tiny-decoder", ["good"], max_new_tokens=4)
    assert continued["text"].tolist() == [[completion.text]]
    for model, texts, options, message in (
        ("tiny-decoder", ["good"], {"max_new_tokens": 0}, "max_new_tokens"),
        ("tiny", [""], {}, "no token that the model could read"),
    ):
        with pytest.raises(urllib.error.HTTPError) as error:
            inferred(port, model, texts, **options)
        assert (error.value.code, message in error.value.read().decode()) == (400, True)
