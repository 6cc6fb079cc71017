"""Timing of a server with several requests at once."""

from __future__ import annotations

import asyncio

from aiohttp import web

from optimizer.load_test.measure import measure_together
from tests.load_test.test_open_loop import client, embedding, server


def test_no_text_is_sent_twice_while_others_were_not_sent() -> None:
    texts = [f"text {i}" for i in range(1 + 2 * (1 + 3))]  # the first finds the kind of request
    seen = list[str]()

    async def handler(request: web.Request) -> web.Response:
        seen.append((await request.json())["input"])
        return await embedding(request)

    async def scenario() -> None:
        async with server("/v1/embeddings", handler) as url:
            await asyncio.to_thread(measure_together, client(url), texts, (1, 3), 2)

    asyncio.run(scenario())
    assert sorted(seen) == texts
