"""Requests to /v1/chat/completions and /v1/completions, their answers and errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.generate import Options
from tests.harness.server.serving import Client, Reply, on_server

GREEDY = {"temperature": 0, "ignore_eos": True}
HI = [{"role": "user", "content": "hi"}]


def chosen(reply: Reply) -> list[Any]:
    assert reply.status == 200, reply.body
    return list(reply.json["choices"])


def test_an_answer_has_openais_form(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        reply = await client.chat("hi", max_tokens=6, **GREEDY)
        body = reply.json
        with Bundle(decoder_bundle) as opened:
            options = Options(6, temperature=0, ignore_eos=True)
            made = opened.generate([HI], options)[0]
        message = {"role": "assistant", "content": made.text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        assert body["choices"] == [choice]
        assert body["object"] == "chat.completion"
        assert body["id"].startswith("chatcmpl-")
        assert body["model"] == "tiny-decoder"
        assert body["usage"] == {
            "prompt_tokens": made.prompt_tokens,
            "completion_tokens": 6,
            "total_tokens": made.prompt_tokens + 6,
        }

    on_server(decoder_bundle, test)


def test_a_stream_put_together_is_the_answer(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        options = {"max_tokens": 30, "temperature": 1.5, "seed": 3, "n": 3, "stop": ["e"]}
        whole = chosen(await client.chat("hi", **options))
        reply = await client.chat(
            "hi", **options, stream=True, stream_options={"include_usage": True}
        )
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        *chunks, usage, end = reply.events
        assert end == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] > usage["usage"]["completion_tokens"] > 0
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        for choice in whole:
            mine = [c for k in chunks for c in k["choices"] if c["index"] == choice["index"]]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(c["delta"].get("content", "") for c in mine)
            assert text == choice["message"]["content"]
            ends = [c["finish_reason"] for c in mine]
            assert ends == [None] * (len(mine) - 1) + [choice["finish_reason"]]

    on_server(decoder_bundle, test)


def test_completions_stream_too(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        options = {"max_tokens": 9, **GREEDY}
        whole = chosen(await client.complete(["good", "bad film"], **options))
        *chunks, end = (await client.complete(["good", "bad film"], **options, stream=True)).events
        assert end == "[DONE]"
        for choice in whole:
            mine = [c for k in chunks for c in k["choices"] if c["index"] == choice["index"]]
            assert "".join(c["text"] for c in mine) == choice["text"]

    on_server(decoder_bundle, test)


def test_a_seed_gives_the_same_texts_whatever_else_runs(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        options = {"max_tokens": 12, "temperature": 1.5, "seed": 11, "n": 2}
        alone = [c["text"] for c in chosen(await client.complete("good", **options))]
        others = [
            asyncio.create_task(client.complete("x " * i, max_tokens=20, temperature=1.1))
            for i in range(1, 9)
        ]
        crowded = [c["text"] for c in chosen(await client.complete("good", **options))]
        assert crowded == alone
        assert alone[0] != alone[1]
        await asyncio.gather(*others)

    on_server(decoder_bundle, test)


def test_without_a_seed_texts_differ(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        replies = [await client.complete("good", max_tokens=20, temperature=2) for _ in range(3)]
        assert len({chosen(reply)[0]["text"] for reply in replies}) > 1

    on_server(decoder_bundle, test)


def test_several_greedy_texts_are_given_to_who_asked_for_temperature_0_alone(
    decoder_bundle: Path,
) -> None:
    async def test(client: Client) -> None:
        error = (await client.complete("good", n=2)).json["error"]
        assert (error["param"], "temperature" in error["message"]) == ("n", True)
        one, other = chosen(await client.complete("good", n=2, **GREEDY))
        assert one["text"] == other["text"]

    on_server(decoder_bundle, test)


def test_logprobs_are_of_the_tokens_that_came_and_of_the_likeliest(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        options = {"max_tokens": 5, **GREEDY}
        reply = await client.chat("hi", logprobs=True, top_logprobs=2, **options)
        entries = chosen(reply)[0]["logprobs"]["content"]
        assert len(entries) == 5
        for entry in entries:
            assert len(entry["top_logprobs"]) == 2
            top = [t["logprob"] for t in entry["top_logprobs"]]
            assert entry["logprob"] == top[0] >= top[1]
            assert entry["logprob"] < 0
        streamed = await client.chat("hi", logprobs=True, top_logprobs=2, stream=True, **options)
        pieces = [c["choices"][0]["logprobs"] for c in streamed.events[:-1]]
        assert [e for piece in pieces if piece for e in piece["content"]] == entries
        text = chosen(await client.complete("hi", logprobs=1, **options))[0]
        assert len(text["logprobs"]["tokens"]) == 5
        assert text["logprobs"]["text_offset"][0] == 0

    on_server(decoder_bundle, test)


REFUSED: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("chat/completions", {"model": "other", "messages": HI}, 404, "model"),
    ("chat/completions", {"messages": HI, "model": None}, 404, "model"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": [{"content": "hi"}]}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, 400, "messages"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages",
    ),
    ("chat/completions", {"messages": HI, "max_tokens": 0}, 400, "max_tokens"),
    ("chat/completions", {"messages": HI, "max_tokens": 96}, 400, "max_tokens"),
    (
        "chat/completions",
        {"messages": HI, "max_completion_tokens": True},
        400,
        "max_completion_tokens",
    ),
    ("chat/completions", {"messages": HI, "n": 0}, 400, "n"),
    ("chat/completions", {"messages": HI, "n": 10**9}, 400, "n"),
    ("chat/completions", {"messages": HI, "n": 200, "max_tokens": 60}, 400, "max_tokens"),
    ("chat/completions", {"messages": HI, "temperature": -1}, 400, "temperature"),
    ("chat/completions", {"messages": HI, "temperature": "hot"}, 400, "temperature"),
    ("chat/completions", {"messages": HI, "top_p": 1.5}, 400, "top_p"),
    ("chat/completions", {"messages": HI, "seed": -1}, 400, "seed"),
    ("chat/completions", {"messages": HI, "stop": [""]}, 400, "stop"),
    ("chat/completions", {"messages": HI, "stop": ["x"] * 65}, 400, "stop"),
    ("chat/completions", {"messages": HI, "stop": 3}, 400, "stop"),
    ("chat/completions", {"messages": HI, "stream": "yes"}, 400, "stream"),
    ("chat/completions", {"messages": HI, "stream_options": {}, "stream": False}, 200, None),
    (
        "chat/completions",
        {"messages": HI, "stream_options": {"include_usage": True}},
        400,
        "stream_options",
    ),
    ("chat/completions", {"messages": HI, "top_logprobs": 2}, 400, "top_logprobs"),
    (
        "chat/completions",
        {"messages": HI, "logprobs": True, "top_logprobs": 21},
        400,
        "top_logprobs",
    ),
    ("chat/completions", {"messages": HI, "tools": [{"type": "function"}]}, 400, "tools"),
    ("chat/completions", {"messages": HI, "response_format": "json"}, 400, "response_format"),
    ("chat/completions", {"messages": HI, "response_format": {"type": "text"}}, 200, None),
    ("chat/completions", {"messages": HI, "frequency_penalty": 1}, 400, "frequency_penalty"),
    ("chat/completions", {"messages": HI, "frequency_penalty": 0, "user": "u"}, 200, None),
    ("chat/completions", {"messages": HI, "confidential": 1}, 400, None),
    ("completions", {"prompt": ""}, 400, None),
    ("completions", {"prompt": "\ud800"}, 400, None),
    ("completions", {"prompt": [[1, 2], "a"]}, 200, None),
    ("completions", {"prompt": [1, 10**9]}, 400, None),
    ("completions", {"prompt": [1, True]}, 400, "prompt"),
    ("completions", {"prompt": "good " * 200}, 400, None),
    ("completions", {"prompt": ["a"] * 257}, 413, None),
    ("completions", {"prompt": "a", "best_of": 3}, 400, "best_of"),
]


def test_what_is_not_accepted_is_named_and_nothing_of_it_repeated(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        for path, body, status, param in REFUSED:
            reply = await client.ask("POST", f"/v1/{path}", {"model": "tiny-decoder", **body})
            assert reply.status == status, (body, reply.body)
            if status != 200:
                error = reply.json["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["type"] == "invalid_request_error"
                assert param is None or error["param"] == param
                assert "confidential" not in error["message"]
                assert "hot" not in error["message"]

    on_server(decoder_bundle, test, "--max-texts", "256")


def test_bodies_that_are_no_request_are_refused(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        for body in (b"", b"{", b"[]", b'{"model": "\xff"}', b'{"temperature": NaN}'):
            reply = await client.ask("POST", "/v1/chat/completions", body)
            assert reply.status == 400 or json.loads(body)
        assert (await client.ask("GET", "/v1/chat/completions")).status == 405

    on_server(decoder_bundle, test)


def test_a_model_of_embeddings_continues_no_text_and_the_other_way_round(
    made: Path, decoder_bundle: Path
) -> None:
    async def no_text(client: Client) -> None:
        reply = await client.ask("POST", "/v1/completions", {"model": "tiny", "prompt": "a"})
        assert reply.status == 404

    async def no_embedding(client: Client) -> None:
        body = {"model": "tiny-decoder", "input": "a"}
        assert (await client.ask("POST", "/v1/embeddings", body)).status == 404
        assert (await client.ask("GET", "/v2/models/tiny-decoder-tensors")).status == 404

    on_server(made, no_text)
    on_server(decoder_bundle, no_embedding)


@pytest.mark.parametrize(
    "content", ["hi", [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]]
)
def test_a_message_may_be_in_parts(decoder_bundle: Path, content: Any) -> None:
    async def test(client: Client) -> None:
        reply = await client.chat(content, max_tokens=6, **GREEDY)
        assert chosen(reply) == chosen(await client.chat("hi", max_tokens=6, **GREEDY))

    on_server(decoder_bundle, test)


def test_a_stream_that_fails_after_its_first_token_ends_with_an_error(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        slots: Any = client.app.first_service().engine.model.slots  # type: ignore[union-attr]

        def broken(tokens: Any) -> Any:
            raise RuntimeError("confidential")

        monkeypatch.setattr(slots, "step", broken)
        *_, last = (await client.chat("hi", stream=True, **GREEDY)).events
        assert last["error"]["message"] == "the model failed (unexpected failure)"

    on_server(decoder_bundle, test)
