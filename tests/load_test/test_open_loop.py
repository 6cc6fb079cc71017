"""Requests are sent when they are due, and the reply to each is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from optimizer.foundation.errors import InputError, MachineError
from optimizer.load_test import open_loop
from optimizer.load_test.http_client import HttpClient
from optimizer.load_test.requests import BY_TEXT

EMBEDDINGS, COMPLETIONS, _ = BY_TEXT
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(path: str, handler: Handler) -> AsyncIterator[str]:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post(path, handler)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def embedding(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"embedding": (await request.json())["input"].upper()}]})


def client(url: str, patience: float = 30.0) -> HttpClient:
    return HttpClient(url, "", 4, patience)


def test_a_stalled_server_holds_back_no_request() -> None:
    """The first answer is sent when the last request has arrived."""

    async def scenario() -> Any:
        waiting, release = 0, asyncio.Event()

        async def handler(request: web.Request) -> web.Response:
            nonlocal waiting
            waiting += 1
            if waiting == 12:
                release.set()
            await release.wait()
            return await embedding(request)

        async with server("/v1/embeddings", handler) as url, client(url) as c:
            due = [0.002 * i for i in range(12)]
            return await open_loop.send_all(c, EMBEDDINGS, "m", ["a", "b"], due)

    outcomes = asyncio.run(scenario())
    assert [o.answer for o in outcomes] == ["A", "B"] * 6
    last = max(o.sent for o in outcomes)
    assert all(o.due <= o.sent <= last < o.ended for o in outcomes)


def test_the_kind_of_requests_is_the_first_that_is_answered() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"outputs": [{"data": [1]}], "id": "changes"})

    async def scenario() -> Any:
        async with server("/v2/models/m/infer", handler) as url, client(url) as c:
            kind = await c.kind(await c.model(), "text", "a")
            return kind, await open_loop.ask_alone(c, kind, "m", ["a"])

    kind, expected = asyncio.run(scenario())
    assert kind.name == "infer"
    assert expected == {"a": '[{"data": [1]}]'}


def events(*parts: str, done: bool = True) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        for part in parts:
            document = json.dumps({"choices": [{"text": part}]})
            await response.write(f"data: {document}\n\n".encode())
        await response.write(b"data: [DONE]\n\n" if done else b"")
        return response

    return handler


@pytest.mark.parametrize("done", [True, False])
def test_a_streamed_answer_is_its_pieces_and_lost_where_it_breaks_off(done: bool) -> None:
    async def scenario() -> Any:
        async with (
            server("/v1/completions", events("so", "on", done=done)) as url,
            client(url) as c,
        ):
            return await open_loop.send_all(c, COMPLETIONS, "m", ["a"], [0.0])

    (outcome,) = asyncio.run(scenario())
    assert len(outcome.pieces) == 2
    assert (outcome.answer, outcome.lost) == ("soon", "" if done else "ValueError")


def test_an_answer_that_does_not_come_in_time_is_lost() -> None:
    async def scenario() -> Any:
        late = asyncio.Event()

        async def handler(_: web.Request) -> web.Response:
            await late.wait()
            return web.Response()

        async with server("/v1/embeddings", handler) as url, client(url, patience=0.05) as c:
            try:
                return await open_loop.send_all(c, EMBEDDINGS, "m", ["a"], [0.0])
            finally:
                late.set()

    (outcome,) = asyncio.run(scenario())
    assert (outcome.status, outcome.lost) == (0, "no answer in time")


def test_a_server_of_something_else_is_refused() -> None:
    async def scenario(path: str) -> None:
        async with server(path, embedding) as url, client(url) as c:
            await c.kind(await c.model(), "text", "a")

    with pytest.raises(InputError, match=r"embeddings: 404; .*completions: 404; .*infer: 404"):
        asyncio.run(scenario("/other"))


def test_where_nothing_listens_it_says_so() -> None:
    async def scenario() -> None:
        async with client("http://127.0.0.1:9") as c:
            await c.model()

    with pytest.raises(MachineError, match="Is the server running"):
        asyncio.run(scenario())
