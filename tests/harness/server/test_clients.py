"""Clients that others wrote get the answers of predict: tritonclient, kserve's and openai's."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.generate import Options
from tests.harness.commands.test_serve import started
from tests.package.bundles.small_bundle import edited

CLIENTS = ("tritonclient[http,grpc]==2.73.0", "kserve==0.21.0", "openai==3.54.0")
TEXTS = ["good", "a good film"]
HEAD = f"""
import json, sys
import numpy as np
http, grpc, name = int(sys.argv[1]), int(sys.argv[2]), "tiny"
expected = np.array(json.loads(sys.argv[3]), np.float32)
TEXTS = {TEXTS!r}
BYTES = np.array([t.encode() for t in TEXTS], object)
def check(array):
    assert np.array_equal(np.asarray(array, np.float32).reshape(expected.shape), expected)
"""
TRITON = """
import tritonclient.grpc, tritonclient.http
from tritonclient.utils import InferenceServerException
for module, port in ((tritonclient.http, http), (tritonclient.grpc, grpc)):
    client = module.InferenceServerClient(f"127.0.0.1:{port}")
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(name)
    assert not client.is_model_ready("other")
    text = module.InferInput("text", [2], "BYTES")
    text.set_data_from_numpy(BYTES)
    check(client.infer(name, [text], request_id="1").as_numpy("embedding"))
    answers = client.infer(name, [text], outputs=[module.InferRequestedOutput("answer")])
    check([json.loads(a)["embedding"] for a in answers.as_numpy("answer")])
    try:
        client.infer("other", [text])
    except InferenceServerException as e:
        assert e.status() in ("404", "StatusCode.NOT_FOUND"), e.status()
    else:
        raise SystemExit("an unknown model was answered")
    config, stats = client.get_model_config(name), client.get_inference_statistics(name)
    if module is tritonclient.grpc:
        config, stats = config.config, stats.model_stats[0]
        assert config.input[0].data_type == 13 and stats.inference_stats.success.count, stats
        assert config.instance_group[0].kind == 2 and config.max_batch_size == 256, config
    else:
        assert config["input"][0]["data_type"] == "TYPE_STRING", config
        assert stats["model_stats"][0]["inference_stats"]["success"]["count"] == 2, stats
    if module is tritonclient.http:
        for packing in ("gzip", "deflate"):
            answer = client.infer(name, [text], request_compression_algorithm=packing)
            check(answer.as_numpy("embedding"))
        text.set_data_from_numpy(BYTES, binary_data=False)
        output = module.InferRequestedOutput("embedding", binary_data=False)
        check(client.infer(name, [text], outputs=[output]).as_numpy("embedding"))
    client.close()
"""
KSERVE = """
import asyncio
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.inference_client import InferenceGRPCClient
async def ask():
    client, base = InferenceRESTClient(RESTConfig(protocol="v2")), f"http://127.0.0.1:{http}"
    assert await client.is_server_live(base) and await client.is_server_ready(base)
    assert await client.is_model_ready(base, name)
    text = InferInput("text", [2], "BYTES")
    for binary in (False, True):
        text.set_data_from_numpy(BYTES, binary_data=binary)
        answer = await client.infer(base, InferRequest(name, [text]), model_name=name)
        check(answer.outputs[0].as_numpy())
    await client.close()
    client = InferenceGRPCClient(f"127.0.0.1:{grpc}")
    assert await client.is_server_ready() and await client.is_model_ready(name)
    check((await client.infer(InferRequest(name, [text]))).outputs[0].as_numpy())
    await client.close()
asyncio.run(ask())
"""
STREAMS = """
import json, queue, sys
import numpy as np
import tritonclient.grpc as triton
port, expected, prompts = int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
client, answers = triton.InferenceServerClient(f"127.0.0.1:{port}"), queue.Queue()
client.start_stream(lambda result, error: answers.put((result, error)))
for i, prompt in enumerate(prompts):
    text = triton.InferInput("text", [1], "BYTES")
    text.set_data_from_numpy(np.array([prompt.encode()], object))
    client.async_stream_infer("tiny-decoder", [text], request_id=str(i),
        enable_empty_final_response=True, parameters={"max_new_tokens": 9})
pieces, left = {str(i): [] for i in range(len(prompts))}, set(map(str, range(len(prompts))))
while left:
    result, error = answers.get(timeout=30)
    assert error is None, error
    response = result.get_response()
    pieces[response.id].append(result.as_numpy("text")[0])
    if response.parameters["triton_final_response"].bool_param:
        left.remove(response.id)
assert [b"".join(p).decode() for p in pieces.values()] == expected
client.async_stream_infer("other", [text])
result, error = answers.get(timeout=30)
assert result is None and "unknown model" in str(error), error
text.set_data_from_numpy(np.array([b"good"], object))
client.async_stream_infer("tiny-decoder", [text], parameters={"max_new_tokens": 300})
answers.get(timeout=30)
client.stop_stream(cancel_requests=True)
"""
OPENAI = """
import openai
client = openai.OpenAI(base_url=f"http://127.0.0.1:{http}/v1", api_key="x", max_retries=0)
assert [m.id for m in client.models.list()] == [name]
for options in ({}, {"encoding_format": "float"}):
    answer = client.embeddings.create(model=name, input=TEXTS, **options)
    check([d.embedding for d in answer.data])
for error, model, value in (
    (openai.NotFoundError, "other", "a"),
    (openai.BadRequestError, name, [[1, 2]]),
):
    try:
        client.embeddings.create(model=model, input=value)
    except error:
        continue
    raise SystemExit("a wrong request was answered")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the clients, which need an older protobuf than ours."""
    venv = tmp_path_factory.mktemp("clients")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    interpreter = venv / "bin" / "python"
    command = [str(interpreter), "-m", "pip", "install", "-q", *CLIENTS]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"cannot be installed here: {', '.join(CLIENTS)}")
    return interpreter


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("grpc"), reason="grpcio is not installed: pip install '.[serve]'")
def test_every_client_gets_the_answers_of_predict(bundle: Path, python: Path) -> None:
    with Bundle(bundle) as opened:
        expected = json.dumps([opened.predict([t])[0]["embedding"] for t in TEXTS])
    process, port, lines = started(bundle, "--grpc-port", "0")
    try:
        (grpc,) = [line["grpc_port"] for line in lines if "grpc_port" in line]
        for client in (TRITON, KSERVE, OPENAI):
            command = [str(python), "-c", HEAD + client, str(port), str(grpc), expected]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
    finally:
        process.terminate()
        process.wait(20)
        if process.stderr:
            process.stderr.close()


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("grpc"), reason="grpcio is not installed: pip install '.[serve]'")
def test_tritonclient_streams_the_texts_of_predict(decoder_bundle: Path, python: Path) -> None:
    prompts = ["good", "a good film", "never again"]
    with Bundle(decoder_bundle) as opened:
        answers = opened.generate(prompts, Options(max_new_tokens=9))
    process, _, lines = started(decoder_bundle, "--grpc-port", "0", "--slots", "2")
    try:
        (port,) = [line["grpc_port"] for line in lines if "grpc_port" in line]
        asked = (str(port), json.dumps([a.text for a in answers]), json.dumps(prompts))
        command = [str(python), "-c", STREAMS, *asked]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    finally:
        process.terminate()
        process.wait(20)
        if process.stderr:
            process.stderr.close()


LOADS = """
import sys
import tritonclient.http
port, link, folder = sys.argv[1:]
client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}")
headers = {"Authorization": "Bearer key"}
rows = client.get_model_repository_index(headers=headers)
assert [(r["version"], r["state"]) for r in rows] == [("1", "READY")], rows
import pathlib
pathlib.Path(link).unlink()
pathlib.Path(link).symlink_to(folder)
client.load_model("tiny", headers=headers)
rows = client.get_model_repository_index(headers=headers)
assert rows[0]["version"] == "2", rows
"""


@pytest.mark.slow
def test_tritonclient_loads_a_new_version(bundle: Path, python: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "second"))
    second = edited(copy, lambda manifest: manifest.update(version="2"))
    (tmp_path / "token").write_text("key")
    (tmp_path / "link").symlink_to(bundle)
    words = ("--bundle", str(tmp_path / "link"), "--token-file", str(tmp_path / "token"))
    process, port, _ = started(bundle, *words)
    try:
        command = [str(python), "-c", LOADS, str(port), str(tmp_path / "link"), str(second)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    finally:
        process.terminate()
        process.wait(20)
        if process.stderr:
            process.stderr.close()
