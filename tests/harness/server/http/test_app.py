"""Answers over HTTP: equal to predict's, and a clean error for whatever is not a request."""

import asyncio
import base64
import gzip
import json
import struct
import zlib
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.server.http.app import App
from optimizer.harness.server.http.hosts import Hosts
from optimizer.harness.server.http.request import Security
from optimizer.harness.server.refusals import OverloadError
from optimizer.harness.server.request import QueuePlace
from optimizer.harness.server.scheduling.engine import BatchEngine
from tests.harness.server.serving import Client, Reply, on_server

TEXTS = ["good", "a good film", "bad", "film film film", "a bad film", "good good good bad"]
SECRET = "confidential"
INFER = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def predicted(made: Path) -> dict[str, Any]:
    """Each text's answer alone."""
    with Bundle(made) as bundle:
        return {text: bundle.predict([text])[0] for text in TEXTS}


def text_input(texts: list[str]) -> dict[str, Any]:
    return {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}


def error(reply: Reply) -> str:
    return str(reply.json["error"])


async def asked_at_once(client: Client, texts: list[str], predicted: dict[str, Any]) -> None:
    """Each alone and all in one request, at the same time: the answers are predict's."""
    replies = await asyncio.gather(*(client.infer([t]) for t in texts), client.infer(texts))
    for asked, reply in zip([*([t] for t in texts), texts], replies, strict=True):
        answers = [json.loads(a) for a in reply.json["outputs"][0]["data"]]
        assert answers == [{**predicted[t], "engine": "onnxruntime-cpu"} for t in asked]


def test_answers_are_those_of_predict_whatever_comes_at_once(
    made: Path, predicted: dict[str, Any]
) -> None:
    async def test(client: Client) -> None:
        texts = TEXTS * 20
        await asked_at_once(client, texts, predicted)
        metrics = (await client.ask("GET", "/metrics")).body.decode()
        batches = float(metrics.split("nv_inference_exec_count{")[1].split("} ")[1].split()[0])
        assert batches < len(texts)  # some shared one

    on_server(made, test, "--max-wait", "600", "--timeout", "600")


def test_several_workers_give_each_text_the_bits_of_predict(
    made: Path, predicted: dict[str, Any]
) -> None:
    async def test(client: Client) -> None:
        await asked_at_once(client, TEXTS * 20, predicted)

    on_server(made, test, "--max-wait", "600", "--timeout", "600", "--workers", "3")


def test_an_embedding_is_the_same_numbers_in_json_in_bytes_and_from_openai(
    made: Path, predicted: dict[str, Any]
) -> None:
    async def test(client: Client) -> None:
        expected = np.array(predicted["good"]["embedding"], np.float32)
        plain = await client.ask("POST", INFER, {"inputs": [text_input(["good"])]})
        (output,) = plain.json["outputs"]
        assert (output["name"], output["shape"]) == ("embedding", [1, 32])
        assert np.array_equal(np.array(output["data"], np.float32), expected)
        document = {
            "inputs": [text_input(["good"])],
            "outputs": [{"name": "embedding", "parameters": {"binary_data": True}}],
        }
        raw = await client.ask("POST", INFER, document)
        length = int(raw.headers["inference-header-content-length"])
        assert raw.headers["content-type"] == "application/octet-stream"
        assert raw.body[length:] == expected.tobytes()
        body = {"model": "tiny", "input": "good", "encoding_format": "base64"}
        openai = (await client.ask("POST", "/v1/embeddings", body)).json
        assert base64.b64decode(openai["data"][0]["embedding"]) == expected.tobytes()
        assert openai["usage"] == {"prompt_tokens": 3, "total_tokens": 3}

    on_server(made, test)


def test_raw_tensors_go_through_the_model_as_they_are(made: Path) -> None:
    async def test(client: Client) -> None:
        names = ("input_ids", "attention_mask")
        arrays = {n: np.ones((2, 3), np.int64) for n in names}
        head = json.dumps(
            {
                "inputs": [
                    {
                        "name": n,
                        "datatype": "INT64",
                        "shape": [2, 3],
                        "parameters": {"binary_data_size": 48},
                    }
                    for n in names
                ]
            }
        ).encode()
        body = head + b"".join(a.tobytes() for a in arrays.values())
        headers = {"Inference-Header-Content-Length": str(len(head))}
        path = "/v2/models/tiny-tensors/infer"
        reply = await client.ask("POST", path, body, headers)
        (output,) = reply.json["outputs"]
        with Bundle(made) as bundle:
            expected = bundle.predictor.infer(arrays)["last_hidden_state"]
        assert np.array_equal(
            np.array(output["data"], np.float32).reshape(output["shape"]), expected
        )

    on_server(made, test)


def test_health_is_json_and_ready_only_with_a_model(made: Path) -> None:
    async def unready() -> None:
        client = Client(App(Security(), lambda **_: None), [])
        assert (await client.ask("GET", "/v2/health/live")).json == {"live": True}
        for path in ("/v2/health/ready", "/readyz"):
            reply = await client.ask("GET", path)
            assert (reply.status, reply.json) == (503, {"ready": False})
        assert (await client.infer(["good"])).status == 503

    asyncio.run(unready())

    async def ready(client: Client) -> None:
        for path in ("/v2/health/ready", "/v2/models/tiny/ready", "/v2/models/tiny-tensors/ready"):
            reply = await client.ask("GET", path)
            assert (reply.status, reply.json["ready"]) == (200, True)
        client.app.first_service().engine.drain()
        assert (await client.ask("GET", "/readyz")).status == 503
        refused = await client.infer(["good"])
        assert (refused.status, "retry-after" in refused.headers) == (503, True)

    on_server(made, ready)


def test_metadata_names_what_infer_takes_and_gives(made: Path) -> None:
    async def test(client: Client) -> None:
        server = (await client.ask("GET", "/v2")).json
        assert "binary_tensor_data" in server["extensions"]
        for name, inputs in (("tiny", {"text"}), ("tiny-tensors", {"input_ids", "attention_mask"})):
            for path in (f"/v2/models/{name}", f"/v2/models/{name}/versions/1"):
                document = (await client.ask("GET", path)).json
                assert {i["name"] for i in document["inputs"]} == inputs
                assert all(o["shape"][0] == -1 for o in document["outputs"])

    on_server(made, test)


GOOD = {"inputs": [text_input(["good"])]}
IDS = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}
MASK = {**IDS, "name": "attention_mask", "data": [1, 1]}
RAW = "/v2/models/tiny-tensors/infer"
SECRET_INPUT = {**text_input([SECRET]), "name": SECRET}
LONG_IDS = [{**t, "shape": [1, 33], "data": [1] * 33} for t in (IDS, MASK)]
BAD: dict[str, tuple[str, str, Any, dict[str, str], int]] = {
    "unknown path": ("GET", "/nothing", b"", {}, 404),
    "unknown model": ("POST", "/v2/models/other/infer", GOOD, {}, 404),
    "traversal": ("POST", "/v2/models/../../etc/passwd/infer", GOOD, {}, 404),
    "unknown version": ("POST", "/v2/models/tiny/versions/9/infer", GOOD, {}, 404),
    "wrong method": ("GET", INFER, b"", {}, 405),
    "no JSON": ("POST", INFER, b"{" + SECRET.encode(), {}, 400),
    "other input": ("POST", INFER, {"inputs": [SECRET_INPUT]}, {}, 400),
    "other output": ("POST", INFER, {**GOOD, "outputs": [{"name": SECRET}]}, {}, 400),
    "no text": ("POST", INFER, {"inputs": [text_input([])]}, {}, 413),
    "many texts": ("POST", INFER, {"inputs": [text_input([SECRET] * 257)]}, {}, 413),
    "blank text": ("POST", INFER, {"inputs": [text_input([" "])]}, {}, 400),
    "timeout": ("POST", INFER, {**GOOD, "parameters": {"timeout": SECRET}}, {}, 400),
    "priority": ("POST", INFER, {**GOOD, "parameters": {"priority": -1}}, {}, 400),
    "header": ("POST", INFER, GOOD, {"X-Request-Timeout": "nan"}, 400),
    "encoding": ("POST", INFER, GOOD, {"Content-Encoding": "br"}, 400),
    "no gzip": ("POST", INFER, GOOD, {"Content-Encoding": "gzip"}, 400),
    "half a gzip": ("POST", INFER, gzip.compress(b"{}")[:-4], {"Content-Encoding": "gzip"}, 400),
    "bomb": ("POST", INFER, gzip.compress(b" " * (9 << 20)), {"Content-Encoding": "gzip"}, 413),
    "long body": ("POST", INFER, b" " * (1 << 20) + b" ", {}, 413),
    "announced": ("POST", INFER, b"", {"Content-Length": str(1 << 40)}, 413),
    "missing tensor": ("POST", RAW, {"inputs": [IDS]}, {}, 400),
    "unknown id": ("POST", RAW, {"inputs": [{**IDS, "data": [1, 1 << 40]}, MASK]}, {}, 400),
    "type list": ("POST", RAW, {"inputs": [{**IDS, "datatype": ["INT64"]}, MASK]}, {}, 400),
    "type object": ("POST", RAW, {"inputs": [{**IDS, "datatype": {}}, MASK]}, {}, 400),
    "wrong type": ("POST", RAW, {"inputs": [{**IDS, "datatype": "INT32"}, MASK]}, {}, 400),
    "wrong rank": ("POST", RAW, {"inputs": [{**IDS, "shape": [2]}, MASK]}, {}, 400),
    "uneven": ("POST", RAW, {"inputs": [{**IDS, "shape": [2, 1]}, MASK]}, {}, 400),
    "too long": ("POST", RAW, {"inputs": LONG_IDS}, {}, 400),
    "other model": ("POST", "/v1/embeddings", {"model": SECRET, "input": "good"}, {}, 404),
    "ids": ("POST", "/v1/embeddings", {"model": "tiny", "input": [1, 2]}, {}, 400),
    "field": ("POST", "/v1/embeddings", {"model": "tiny", "input": "a", SECRET: 1}, {}, 400),
    "chat": ("POST", "/v1/chat/completions", {"model": "tiny"}, {}, 404),
}


def test_what_is_no_request_gets_its_own_error_without_its_text_and_the_next_is_answered(
    made: Path,
) -> None:
    async def test(client: Client) -> None:
        for name, (method, path, body, headers, status) in BAD.items():
            reply = await client.ask(method, path, body, headers)
            assert (name, reply.status) == (name, status), reply.body
            assert reply.json["error"], name
            assert SECRET not in reply.body.decode(), name
        assert SECRET not in json.dumps(client.lines)
        assert {line["level"] for line in client.lines} == {"info"}
        assert (await client.infer(["good"])).status == 200

    on_server(made, test, security=Security(largest=1 << 20))


def test_invalid_utf8_and_nan_are_refused(made: Path) -> None:
    async def test(client: Client) -> None:
        tensor = {**text_input([]), "shape": [1], "parameters": {"binary_data_size": 6}}
        del tensor["data"]
        head = json.dumps({"inputs": [tensor]}).encode()
        body = head + struct.pack("<I", 2) + b"a\xff"
        reply = await client.ask(
            "POST", INFER, body, {"Inference-Header-Content-Length": str(len(head))}
        )
        assert (reply.status, error(reply)) == (
            400,
            "input 'text', element 0: byte 2 is not UTF-8",
        )
        reply = await client.ask("POST", INFER, b'{"inputs": [NaN]}')
        assert reply.status == 400

    on_server(made, test)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_packed_body_is_read(encoding: str, made: Path) -> None:
    async def test(client: Client) -> None:
        data = json.dumps(GOOD).encode()
        body = gzip.compress(data) if encoding == "gzip" else zlib.compress(data)
        assert (await client.ask("POST", INFER, body, {"Content-Encoding": encoding})).status == 200

    on_server(made, test)


def test_with_a_token_only_its_owners_and_the_cluster_s_probes_are_answered(made: Path) -> None:
    async def test(client: Client) -> None:
        assert (await client.infer(["good"])).status == 401
        for value in ("Bearer other", "Basic sesame", "Bearer"):
            reply = await client.ask("POST", INFER, GOOD, {"Authorization": value})
            assert reply.status == 401
        right = {"Authorization": "Bearer sesame"}
        assert (await client.ask("POST", INFER, GOOD, right)).status == 200
        assert (await client.ask("GET", "/metrics")).status == 401
        assert (await client.ask("GET", "/readyz")).status == 200

    on_server(made, test, security=Security(token="sesame"))


def test_a_server_that_is_asked_by_another_name_answers_nothing(made: Path) -> None:
    async def test(client: Client) -> None:
        for path in ("/healthz", "/metrics", "/v1/models", "/nowhere"):
            reply = await client.ask("GET", path, headers={"Host": "evil.example:8000"})
            assert reply.status == 421
            assert b"evil" not in reply.body
            reply = await client.ask("GET", path, headers={"Host": "model.example"})
            assert reply.status in (200, 404)

    on_server(made, test, security=Security(hosts=Hosts(frozenset({"model.example"}))))


def test_a_text_that_was_cut_is_told(made: Path) -> None:
    async def test(client: Client) -> None:
        reply = await client.infer(["good " * 50, "good"])
        assert reply.headers["x-truncated-texts"] == "1"
        assert "x-truncated-texts" not in (await client.infer(["good"])).headers

    on_server(made, test)


def test_a_request_has_the_id_that_its_client_gave_unless_that_is_no_id(made: Path) -> None:
    async def test(client: Client) -> None:
        for given, same in (("abc-1", True), ("a b\n", False), ("x" * 500, False)):
            reply = await client.ask("GET", "/healthz", headers={"X-Request-Id": given})
            assert (reply.headers["x-request-id"] == given) == same
            assert client.lines[-1]["request_id"] == reply.headers["x-request-id"]

    on_server(made, test)


BUSY = {
    "of OpenAI's": ("/v1/embeddings", 429),
    "of v2": (INFER, 503),
    "of a version": ("/v2/models/tiny/versions/1/infer", 503),
    "of tensors": ("/v2/models/tiny-tensors/infer", 503),
}


@pytest.mark.parametrize("name", BUSY)
def test_a_refusal_is_counted_logged_and_says_when_to_ask_again(name: str, made: Path) -> None:
    path, status = BUSY[name]

    async def test(client: Client) -> None:
        def admit(address: str) -> NoReturn:
            assert address == client.address
            raise OverloadError("too much is waiting", retry_after=1.5)

        client.app.first_service().engine.admit = admit  # type: ignore[method-assign]
        reply = await client.ask("POST", path, b"{}")  # which is not parsed
        assert (reply.status, reply.headers["retry-after"]) == (status, "2")
        assert client.lines[-1]["status"] == status
        metrics = (await client.ask("GET", "/metrics")).body.decode()
        failed = [x for x in metrics.splitlines() if "request_failure{" in x]
        assert failed[0].endswith('reason="REJECTED"} 1')

    on_server(made, test)


def test_each_request_is_admitted_once_and_has_no_place_when_it_has_ended(made: Path) -> None:
    tensors = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [2, 3]}
    mask = {**tensors, "name": "attention_mask", "data": [1, 1]}

    async def test(client: Client) -> None:
        service = client.app.first_service()
        assert isinstance(service.engine, BatchEngine)
        places, admit = list[QueuePlace](), service.engine.admit

        def counted(address: str) -> QueuePlace:
            places.append(admit(address))
            return places[-1]

        service.engine.admit = counted  # type: ignore[method-assign]
        for number, (path, body, headers, status) in enumerate(
            (
                (INFER, GOOD, {}, 200),
                (INFER, GOOD, {"x-request-timeout": "0"}, 400),
                (INFER, GOOD, {"x-request-timeout": "1e-9"}, 503),
                (INFER, b"{", {}, 400),
                (INFER, b'{"inputs": []}', {}, 400),
                ("/v2/models/tiny-tensors/infer", {"inputs": [tensors, mask]}, {}, 200),
                ("/v2/models/tiny-tensors/infer", {"inputs": [tensors]}, {}, 400),
                ("/v1/embeddings", {"model": "tiny", "input": "good"}, {}, 200),
                ("/v1/embeddings", {"model": "other", "input": "good"}, {}, 404),
            ),
            1,
        ):
            reply = await client.ask("POST", path, body, headers)
            assert reply.status == status, (path, body, reply)
            assert [p.open for p in places] == number * [False], (path, body)

    on_server(made, test)


def test_paths_of_strangers_are_one_label_and_no_failure_of_a_model(made: Path) -> None:
    async def test(client: Client) -> None:
        for path in ("/wp-login.php", "/.env", "/a/b", "/v1/a", "/v1/b"):
            assert (await client.ask("GET", path)).status == 404
        lines = (await client.ask("GET", "/metrics")).body.decode().splitlines()
        counted = [x for x in lines if x.startswith("optimize_requests_total")]
        assert counted == [
            'optimize_requests_total{route="unknown",status="404"} 3',
            'optimize_requests_total{route="v1",status="404"} 2',
        ]
        assert not any("request_failure{" in x and "reason" in x for x in lines)

    on_server(made, test)


def test_every_metric_has_the_prefix_of_whoever_named_it(made: Path, decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        lines = (await client.ask("GET", "/metrics")).body.decode().splitlines()
        names = [x.split()[2] for x in lines if x.startswith("# TYPE")]
        assert names
        assert all(n.startswith(("nv_", "vllm:", "optimize_")) for n in names)

    for bundle in (made, decoder_bundle):
        on_server(bundle, test)
