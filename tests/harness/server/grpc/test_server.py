"""The Open Inference Protocol over gRPC: messages that others' clients read, the same answers."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.server.grpc.messages import METHODS, STREAM, methods
from tests.harness.server.over_grpc import Ask, needs_grpc, over_grpc, refused, texts_request
from tests.harness.server.serving import Client


def test_a_request_has_the_bytes_of_the_protocol() -> None:
    """Field by field, as the wire format has them: (number << 3 | 2), length, content."""
    pytest.importorskip("google.protobuf")
    request = methods()["ModelInfer"].request(model_name="m", id="7", raw_input_contents=[b"x"])
    request.parameters["timeout"].int64_param = 5
    request.inputs.add(name="t", datatype="BYTES", shape=[1])
    tensor = b"\x0a\x01t" + b"\x12\x05BYTES" + b"\x1a\x01\x01"
    parameter = b"\x0a\x07timeout" + b"\x12\x02" + b"\x10\x05"
    assert request.SerializeToString(deterministic=True) == (
        b"\x0a\x01m" + b"\x1a\x017" + bytes([0x22, len(parameter)]) + parameter
        + bytes([0x2A, len(tensor)]) + tensor + b"\x3a\x01x"
    )  # fmt: skip


def test_every_method_has_its_messages() -> None:
    pytest.importorskip("google.protobuf")
    assert set(methods()) == {*METHODS, STREAM}
    names = {m.request.DESCRIPTOR.full_name for m in methods().values()}
    assert "inference.ModelInferRequest" in names


@needs_grpc
def test_answers_are_those_of_predict(made: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        with Bundle(made) as bundle:
            expected = np.array([bundle.predict([t])[0]["embedding"] for t in ("good", "a film")])
        raw = await ask("ModelInfer", texts_request([b"good", b"a film"], id="7"))
        typed = methods()["ModelInfer"].request(model_name="tiny")
        tensor = typed.inputs.add(name="text", datatype="BYTES", shape=[2])
        tensor.contents.bytes_contents.extend([b"good", b"a film"])
        for response in (raw, await ask("ModelInfer", typed)):
            (output,) = response.outputs
            assert (output.name, output.datatype, list(output.shape)) == (
                *("embedding", "FP32"),
                [2, 32],
            )
            vectors = np.frombuffer(response.raw_output_contents[0], "<f4").reshape(2, 32)
            assert np.array_equal(vectors, expected.astype(np.float32))
        assert (raw.id, raw.model_version) == ("7", "1")

    over_grpc(made, test)


@needs_grpc
def test_health_and_metadata(made: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        request = methods()["ModelMetadata"].request(name="tiny")
        metadata = await ask("ModelMetadata", request)
        assert [i.name for i in metadata.inputs] == ["text"]
        assert (await ask("ServerLive")).live
        assert (await ask("ServerReady")).ready
        ready = methods()["ModelReady"].request
        assert (await ask("ModelReady", ready(name="tiny"))).ready
        assert not (await ask("ModelReady", ready(name="other"))).ready
        assert (await ask("ServerMetadata")).name == "optimize-harness"

    over_grpc(made, test)


@needs_grpc
def test_what_is_no_request_has_its_status_and_the_next_is_answered(made: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        good = [b"confidential"]
        unknown = texts_request(good)
        unknown.model_name = "other"
        short = texts_request(good)
        short.raw_input_contents[0] = b"\xff\0\0\0a"
        late = texts_request(good)
        late.parameters["timeout"].int64_param = 1
        large = texts_request([b"x" * (1 << 20)])
        mixed = texts_request(good)
        mixed.inputs[0].contents.bytes_contents.append(b"a")
        shaped = texts_request(good)
        shaped.inputs[0].shape[:] = [-1]
        for request, code in (
            (unknown, "NOT_FOUND"),
            (short, "INVALID_ARGUMENT"),
            (late, "DEADLINE_EXCEEDED"),
            (large, "RESOURCE_EXHAUSTED"),
            (mixed, "INVALID_ARGUMENT"),
            (shaped, "INVALID_ARGUMENT"),
            (texts_request([b"\xff"]), "INVALID_ARGUMENT"),
        ):
            assert await refused(ask("ModelInfer", request)) == code
        await ask("ModelInfer", texts_request(good))
        client.app.first_service().engine.drain()
        assert await refused(ask("ModelInfer", texts_request(good))) == "UNAVAILABLE"
        assert "confidential" not in str(client.lines)

    over_grpc(made, test)


@needs_grpc
def test_with_a_token_only_its_owners_are_answered(made: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        request = texts_request([b"good"])
        assert await refused(ask("ModelInfer", request)) == "UNAUTHENTICATED"
        await ask("ModelInfer", request, metadata=(("authorization", "Bearer sesame"),))
        assert (await ask("ServerReady")).ready
        await asyncio.sleep(0)

    over_grpc(made, test, token="sesame")


@needs_grpc
def test_the_log_line_of_a_call_has_the_ids_of_its_trace(made: Path) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    header = f"00-{trace}-00f067aa0ba902b7-01"

    async def test(client: Client, ask: Ask) -> None:
        await ask("ModelInfer", texts_request([b"good"]), metadata=(("traceparent", header),))
        assert client.lines[-1]["trace_id"] == trace

    over_grpc(made, test)


def test_a_call_whose_request_does_not_come_is_ended(made: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        path = "/inference.GRPCInferenceService/ModelInfer"
        call = ask._channel.stream_unary(path)()  # a client that opens it and sends nothing
        assert await refused(call) == "CANCELLED"

    over_grpc(made, test, seconds=0.3)


def test_an_output_that_is_named_twice_is_refused(made: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        request = texts_request([b"good"])
        for _ in range(2):
            request.outputs.add(name="embedding")
        assert await refused(ask("ModelInfer", request)) == "INVALID_ARGUMENT"

    over_grpc(made, test)
