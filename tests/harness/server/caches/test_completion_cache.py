"""Cached texts: returned to the same request and, if enabled, to a similar question. A semantic hit
is marked, stays within its frame, and goes with its version.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.errors import InputError
from optimizer.harness.generate import Piece
from optimizer.harness.server.answers import Event
from optimizer.harness.server.caches.completion_cache import RecordingStream
from tests.harness.server.serving import Client, Reply
from tests.harness.server.versions.test_loader import TOKEN, on_loader, turn
from tests.package.bundles.small_bundle import edited

EXACT = ("--cache-mib", "1")
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
SYSTEM = {"role": "system", "content": "short"}
ALIKE = "A  GOOD film"  # of which the encoder sees the same as of the next
QUESTION = "a good film"
Test = Callable[[Client], Awaitable[None]]


def on(test: Test, bundle: Path, *words: str) -> None:
    async def run(client: Client, app: Any) -> None:
        del app
        await test(client)

    on_loader(run, bundle, words=words)


async def chat(client: Client, content: str, *before: Any, **more: Any) -> Reply:
    messages = [*before, {"role": "user", "content": content}]
    body = {"model": "tiny-decoder", "messages": messages, **GREEDY, **more}
    headers = TOKEN | {"Cache-Control": body.pop("control", "")}
    return await client.ask("POST", "/v1/chat/completions", body, headers)


def text(reply: Reply) -> str:
    assert reply.status == 200, reply.body
    return str(reply.json["choices"][0]["message"]["content"])


async def counted(client: Client, name: str) -> int:
    lines = (await client.ask("GET", "/metrics", b"", TOKEN)).body.decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name + "{"))


def test_nothing_is_kept_unless_that_was_asked_for(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        for _ in range(2):
            assert "x-cache" not in (await chat(client, QUESTION)).headers
        assert await counted(client, "vllm:generation_tokens_total") == 12

    on(test, decoder_bundle)


def test_the_same_request_has_the_same_answer_without_the_model(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        for options in ({}, {"temperature": 2.0, "seed": 5, "n": 2, "logprobs": True}):
            first = await chat(client, QUESTION, **options)
            made = await counted(client, "vllm:generation_tokens_total")
            again = await chat(client, QUESTION, **options)
            assert (first.headers["x-cache"], again.headers["x-cache"]) == ("miss", "hit")
            assert first.json["choices"] == again.json["choices"]
            assert first.json["usage"] == again.json["usage"]
            streamed = await chat(client, QUESTION, **options, stream=True)
            assert streamed.headers["x-cache"] == "hit"
            assert streamed.events[-1] == "[DONE]"
            pieces = [c for e in streamed.events[:-1] for c in e["choices"] if c["index"] == 0]
            assert "".join(c["delta"].get("content", "") for c in pieces) == text(first)
            assert await counted(client, "vllm:generation_tokens_total") == made
        for other in ({"content": ALIKE}, {"max_tokens": 5}, {"logprobs": True}, {"seed": 1}):
            reply = await chat(client, **{"content": QUESTION, **other})
            assert reply.headers["x-cache"] == "miss"

    on(test, decoder_bundle, *EXACT)


def test_tokens_that_are_drawn_anew_are_never_kept(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        for _ in range(3):
            assert "x-cache" not in (await chat(client, QUESTION, temperature=1.0)).headers

    on(test, decoder_bundle, *EXACT)


def test_over_v2_options_count(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["good"]}
        seen = []
        for parameters in ({}, {}, {"max_new_tokens": 3}, {"max_new_tokens": 3, "seed": 1}):
            body = {"inputs": [tensor], "parameters": {"temperature": 2.0, **parameters}}
            reply = await client.ask("POST", "/v2/models/tiny-decoder/infer", body, TOKEN)
            seen.append((reply.headers["x-cache"], reply.json["outputs"][0]["data"]))
        assert [state for state, _ in seen] == ["miss", "hit", "miss", "miss"]
        assert seen[0][1] == seen[1][1] != seen[2][1]

    on(test, decoder_bundle, *EXACT)


def test_a_question_that_is_alike_has_the_answer_of_the_other_and_says_so(
    decoder_bundle: Path, semantic: tuple[str, ...]
) -> None:
    async def test(client: Client) -> None:
        assert (await chat(client, "bad", SYSTEM)).headers["x-cache"] == "miss"
        first = await chat(client, QUESTION, SYSTEM)
        alike = await chat(client, ALIKE, SYSTEM, stream=True)
        assert first.headers["x-cache"] == "miss"
        assert alike.headers["x-cache"] == "semantic"
        assert float(alike.headers["x-cache-similarity"]) == pytest.approx(1, abs=1e-3)
        deltas = [c["delta"].get("content", "") for e in alike.events[:-1] for c in e["choices"]]
        assert "".join(deltas) == text(first)
        assert client.lines[-1]["cache"] == "semantic"
        assert await counted(client, "optimize_semantic_cache_hits_total") == 1
        assert await counted(client, "optimize_semantic_cache_misses_total") == 2
        (line,) = [line for line in client.lines if line["event"] == "semantic_cache"]
        assert line["bound"] <= 0.2
        assert not any("film" in str(value) for line in client.lines for value in line.values())

    on(test, decoder_bundle, *semantic)


def test_nothing_else_may_differ(decoder_bundle: Path, semantic: tuple[str, ...]) -> None:
    async def test(client: Client) -> None:
        assert (await chat(client, QUESTION, SYSTEM)).headers["x-cache"] == "miss"
        said = {"role": "assistant", "content": "hi"}
        others: list[tuple[list[Any], dict[str, Any]]] = [
            ([], {}),
            ([{**SYSTEM, "content": "Short"}], {}),
            ([SYSTEM, said], {}),
            ([SYSTEM], {"max_tokens": 5}),
            ([SYSTEM], {"temperature": 1.0, "seed": 1}),
            ([SYSTEM], {"temperature": 1.0, "seed": 2}),
            ([SYSTEM], {"user": "another"}),
            ([SYSTEM], {"logprobs": True}),
            ([SYSTEM], {"stop": "x"}),
        ]
        for before, options in others:
            assert (await chat(client, ALIKE, *before, **options)).headers["x-cache"] == "miss"
        whole = {"model": "tiny-decoder", "prompt": ALIKE, **GREEDY}
        reply = await client.ask("POST", "/v1/completions", whole, TOKEN)
        assert reply.headers["x-cache"] == "miss"
        assert "x-cache" not in (await chat(client, ALIKE, SYSTEM, temperature=1.0)).headers
        assert (await chat(client, ALIKE, SYSTEM)).headers["x-cache"] == "semantic"

    on(test, decoder_bundle, *semantic)


def test_who_doubts_an_answer_has_it_made_and_it_is_then_the_question_s_own(
    decoder_bundle: Path, semantic: tuple[str, ...]
) -> None:
    async def test(client: Client) -> None:
        await chat(client, QUESTION)
        for control in ("no-store", "max-age=0, No-Cache"):
            anew = await chat(client, ALIKE, control=control)
            assert anew.headers["x-cache"] == ("semantic" if control == "no-store" else "miss")
        assert text(await chat(client, ALIKE)) == text(anew)

    on(test, decoder_bundle, *semantic)


def test_nothing_is_kept_of_what_a_client_wants_kept_nowhere(
    decoder_bundle: Path, semantic: tuple[str, ...]
) -> None:
    async def test(client: Client) -> None:
        for _ in range(2):
            reply = await chat(client, QUESTION, control="no-store")
            assert reply.headers["x-cache"] == "miss"

    on(test, decoder_bundle, *EXACT, *semantic)


def test_a_text_that_a_client_left_is_not_kept() -> None:
    async def tokens(*finishes: str | None) -> AsyncIterator[Event]:
        for finish in finishes:
            yield Event(Piece(0, 7, "x", finish))

    async def test() -> None:
        for finishes, expected in (
            ([None, None], 0),
            ([None, "length"], 0),
            ([None, "eos", "eos"], 3),
        ):
            kept: list[Any] = []
            answers: Any = tokens(*finishes)
            assert [e async for e in RecordingStream(answers, 2, kept.extend)]
            assert len(kept) == expected

    asyncio.run(test())


def test_a_question_that_the_encoder_would_cut_is_not_looked_for(
    decoder_bundle: Path, semantic: tuple[str, ...]
) -> None:
    async def test(client: Client) -> None:
        for end in ("good", "bad"):
            reply = await chat(client, "a " * 35 + end, max_tokens=2)
            assert reply.headers.get("x-cache") == "miss", reply.body
        assert await counted(client, "optimize_semantic_cache_skipped_total") == 2

    on(test, decoder_bundle, *semantic)


def test_a_new_version_begins_with_nothing(
    decoder_bundle: Path, semantic: tuple[str, ...], tmp_path: Path
) -> None:
    def change(manifest: Any) -> None:
        manifest["version"] = "2"

    current = tmp_path / "current"
    current.symlink_to(decoder_bundle)
    second = edited(Path(shutil.copytree(decoder_bundle, tmp_path / "second")), change)

    async def test(client: Client, app: Any) -> None:
        kept = app.load.__self__._semantic.cache
        for expected in ("miss", "hit"):
            assert (await chat(client, QUESTION)).headers["x-cache"] == expected
        assert len(kept) == 1
        turn(current, second)
        path = "/v2/repository/models/tiny-decoder/load"
        assert (await client.ask("POST", path, b"", TOKEN)).status == 200
        while client.lines[-1]["event"] != "unloaded":
            await asyncio.sleep(0.001)
        assert len(kept) == 0
        for content, expected in ((QUESTION, "miss"), (QUESTION, "hit"), (ALIKE, "semantic")):
            assert (await chat(client, content)).headers["x-cache"] == expected

    on_loader(test, current, words=(*EXACT, *semantic))


async def nothing(client: Client) -> None:
    raise AssertionError(client)


def test_what_cannot_be_is_refused_at_the_start(
    made: Path, decoder_bundle: Path, semantic: tuple[str, ...]
) -> None:
    for i in range(0, len(semantic), 2):
        with pytest.raises(InputError, match=semantic[i]):
            on(nothing, decoder_bundle, *semantic[:i], *semantic[i + 2 :])
    with pytest.raises(InputError, match="does text-generation"):
        on(nothing, made, *semantic)
    with pytest.raises(InputError, match="computes embeddings"):
        on(nothing, decoder_bundle, *semantic, "--semantic-encoder", str(decoder_bundle))
    with pytest.raises(InputError, match="299 or more"):
        on(nothing, decoder_bundle, *semantic, "--semantic-false-hits", "0.01")
