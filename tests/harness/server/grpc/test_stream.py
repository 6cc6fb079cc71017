"""Triton's streams over gRPC: tokens as they are made, each text that of predict."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.generate import Options
from tests.harness.server.over_grpc import Ask, needs_grpc, over_grpc, refused, texts_request
from tests.harness.server.scheduling.test_decoding import PROMPTS, Gate, engine_of, expected
from tests.harness.server.serving import Client

pytestmark = needs_grpc
FINAL = "triton_final_response"
KINDS = {
    bool: "bool_param",
    int: "int64_param",
    float: "double_param",
    str: "string_param",
}


def asked(prompt: str, number: int = 0, *outputs: str, **options: Any) -> Any:
    request = texts_request([prompt.encode()], model_name="tiny-decoder", id=str(number))
    for name, value in options.items():
        kind = KINDS[type(value)]
        setattr(request.parameters[name], kind, value)
    for name in outputs:
        request.outputs.add(name=name)
    return request


async def sent(call: Any, *requests: Any) -> list[Any]:
    """All responses to requests that are sent at once."""
    for request in requests:
        await call.write(request)
    await call.done_writing()
    return [response async for response in call]


def column(response: Any, name: str) -> bytes:
    """One element of BYTES."""
    answer = response.infer_response
    index = [o.name for o in answer.outputs].index(name)
    return bytes(answer.raw_output_contents[index][4:])


def is_last(response: Any) -> bool:
    return bool(response.infer_response.parameters[FINAL].bool_param)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.3, "seed": 5}])
def test_the_pieces_of_each_request_are_the_text_of_predict(
    decoder_bundle: Path, options: dict[str, Any]
) -> None:
    async def test(client: Client, ask: Ask) -> None:
        requests = [asked(p, i, max_new_tokens=12, **options) for i, p in enumerate(PROMPTS)]
        texts, last = defaultdict[str, bytes](bytes), list[str]()
        for response in await sent(ask.stream(), *requests):
            number = response.infer_response.id
            assert number not in last
            last += [number] * is_last(response)
            texts[number] += column(response, "text")
        assert len(last) == len(PROMPTS)
        assert [texts[str(i)].decode() for i in range(len(PROMPTS))] == expected(
            decoder_bundle, PROMPTS, max_new_tokens=12, **options
        )

    over_grpc(decoder_bundle, test, "--slots", "3")


def test_the_whole_answer_comes_with_the_last_piece_where_it_is_asked_for(
    decoder_bundle: Path,
) -> None:
    async def test(client: Client, ask: Ask) -> None:
        request = asked("good", 0, "answer", "text", max_new_tokens=5, temperature=0.0)
        *before, last = await sent(ask.stream(), request)
        assert {o.name for r in before for o in r.infer_response.outputs} == {"text"}
        with Bundle(decoder_bundle) as bundle:
            options = Options(max_new_tokens=5, temperature=0)
            answer = bundle.generate(["good"], options)[0].to_json()
        found = json.loads(column(last, "answer"))
        assert {n: found[n] for n in answer} == answer

    over_grpc(decoder_bundle, test)


def test_a_token_leaves_before_the_next_is_made(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client, ask: Ask) -> None:
        gate, call = Gate(engine_of(client), monkeypatch), ask.stream()
        await call.write(asked("good", max_new_tokens=4, ignore_eos=True, temperature=0.0))
        for steps in range(3):  # the first token is the prompt's, and needs no step
            assert not is_last(await call.read())
            assert len(gate.sizes) == steps
            gate.open(1)
        assert is_last(await call.read())

    over_grpc(decoder_bundle, test)


def test_a_client_that_leaves_frees_its_slot_within_a_token(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client, ask: Ask) -> None:
        gate, call = Gate(engine_of(client), monkeypatch), ask.stream()
        await call.write(asked("good", max_new_tokens=50, ignore_eos=True))
        await call.read()
        await asyncio.to_thread(gate.at.wait, 20)
        waits = asyncio.create_task(client.complete("bad", max_tokens=2, ignore_eos=True))
        call.cancel()
        while client.lines[-1]["event"] != "request":  # the line of the call
            await asyncio.sleep(0.01)
        gate.open()
        assert (await waits).status == 200
        assert gate.sizes == [1, 1]  # the step that ran when it left, and one of the next text
        assert [line["status"] for line in client.lines[-2:]] == ["CANCELLED", 200]

    over_grpc(decoder_bundle, test, "--slots", "1")


def test_a_stream_that_is_longer_than_its_deadline_ends_and_frees_its_slot(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client, ask: Ask) -> None:
        gate, call = Gate(engine_of(client), monkeypatch), ask.stream(timeout=0.5)
        await call.write(asked("good", max_new_tokens=50, ignore_eos=True))
        await call.read()
        assert await refused(call.read()) == "DEADLINE_EXCEEDED"
        gate.open()
        assert (await client.complete("bad", max_tokens=2, ignore_eos=True)).status == 200
        assert len(gate.sizes) <= 3

    over_grpc(decoder_bundle, test, "--slots", "1")


def test_a_model_that_answers_in_one_run_answers_in_the_order_of_the_requests(made: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        texts = ["good " * n for n in (9, 1, 5, 3)] * 3
        requests = [texts_request([t.encode()], id=str(i)) for i, t in enumerate(texts)]
        responses = await sent(ask.stream(), *requests)
        with Bundle(made) as bundle:
            vectors = [np.array(bundle.predict([t])[0]["embedding"], "<f4") for t in texts]
        assert [r.infer_response.id for r in responses] == [str(i) for i in range(len(texts))]
        assert all(map(is_last, responses))
        raw = [r.infer_response.raw_output_contents[0] for r in responses]
        assert raw == [v.tobytes() for v in vectors]

    over_grpc(made, test, "--rows", "2")


def test_what_is_refused_says_why_and_the_next_request_is_answered(decoder_bundle: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        unknown = asked("confidential", 0)
        unknown.model_name = "other"
        several = texts_request([b"confidential"] * 2, model_name="tiny-decoder", id="1")
        late = asked("confidential", 2, timeout=1)
        wrong = asked("confidential", 3, top_p=-1.0)
        good = asked("good", 4, max_new_tokens=1)
        responses = await sent(ask.stream(), unknown, several, late, wrong, good)
        *errors, answer = sorted(responses, key=lambda r: r.infer_response.id)
        found = {e.infer_response.id: e.error_message for e in errors}
        reasons = ("unknown model", "2 texts", "before its timeout", "top_p")
        assert all(reason in found[str(i)] for i, reason in enumerate(reasons)), found
        assert is_last(answer)
        assert "confidential" not in f"{errors}{client.lines}"

    over_grpc(decoder_bundle, test)


def test_a_client_that_asks_for_codes_has_the_stream_end_with_one(decoder_bundle: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        call = ask.stream(metadata=(("triton_grpc_error", "true"),))
        await call.write(asked("good", timeout=1))
        assert await refused(call.read()) == "DEADLINE_EXCEEDED"

    over_grpc(decoder_bundle, test)


def test_a_server_that_ends_answers_what_it_received_and_waits_for_no_client(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client, ask: Ask) -> None:
        import grpc

        gate, call, idle = Gate(engine_of(client), monkeypatch), ask.stream(), ask.stream()
        await call.write(asked("good", max_new_tokens=5, ignore_eos=True, temperature=0.0))
        responses = [await call.read()]
        drained = asyncio.create_task(client.app.versions.wait_until_drained())
        await asyncio.sleep(0.02)
        await idle.write(asked("bad", 7))
        assert "shutting down" in (await idle.read()).error_message
        gate.open()
        await drained
        await asyncio.wait_for(ask.server.close(60), 10)
        while not is_last(responses[-1]):
            responses.append(await call.read())
        assert [await c.read() for c in (call, idle)] == [grpc.aio.EOF] * 2
        assert is_last(responses[-1])
        assert (
            b"".join(column(r, "text") for r in responses).decode()
            == (
                expected(
                    decoder_bundle, ["good"], max_new_tokens=5, ignore_eos=True, temperature=0
                )[0]
            )
        )

    over_grpc(decoder_bundle, test)


def test_a_stream_without_the_token_is_refused(made: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        assert await refused(ask.stream().read()) == "UNAUTHENTICATED"
        call = ask.stream(metadata=(("authorization", "Bearer sesame"),))
        assert len(await sent(call, texts_request([b"good"]))) == 1

    over_grpc(made, test, token="sesame")


def test_what_is_no_message_ends_the_stream_and_no_other(made: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        good, bad = (
            ask.stream(),
            ask._channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(),
        )
        await bad.write(b"\xff\xff\xff")
        assert await refused(bad.read()) == "INVALID_ARGUMENT"
        assert len(await sent(good, texts_request([b"good"]))) == 1

    over_grpc(made, test)


def test_streams_beyond_the_limit_are_refused(made: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        call = ask.stream()
        await call.write(texts_request([b"good"]))
        await call.read()
        assert await refused(ask("ServerLive")) == "RESOURCE_EXHAUSTED"

    over_grpc(made, test, calls=1)


def test_clients_that_leave_at_any_time_are_no_bug(
    decoder_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(client: Client, ask: Ask) -> None:
        draw = random.Random(0)

        async def leaves() -> None:
            call = ask.stream()
            with suppress(Exception, asyncio.CancelledError):
                for n in range(draw.randint(0, 3)):
                    await call.write(asked("good", n, max_new_tokens=20, ignore_eos=True))
                await asyncio.sleep(draw.uniform(0, 0.05))
                call.cancel()
                await call.read()

        for _ in range(4):
            await asyncio.gather(*(leaves() for _ in range(6)))
        (answer,) = await sent(ask.stream(), asked("good", max_new_tokens=1))
        assert is_last(answer)
        assert not [line for line in client.lines if line["event"] == "bug"]

    over_grpc(decoder_bundle, test)
    assert not [r for r in caplog.records if r.exc_info]


def test_one_client_has_so_many_streams_and_no_more(made: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        call = ask.stream()
        await call.write(texts_request([b"good"]))
        await call.read()
        assert await refused(ask("ServerLive")) == "RESOURCE_EXHAUSTED"

    over_grpc(made, test, of_client=1)
