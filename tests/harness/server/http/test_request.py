"""Requests over HTTP: bytes of their bodies, and work for clients that stay or leave."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from optimizer.harness.server.http.app import App
from optimizer.harness.server.http.request import Security, while_connected


def test_work_is_cancelled_when_the_client_leaves() -> None:
    ended = []

    async def run() -> None:
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def work() -> None:
            gone.set()
            try:
                await asyncio.sleep(20)
            finally:
                ended.append("work")

        with pytest.raises(ClientDisconnect):
            await while_connected(work(), receive)
        await asyncio.sleep(0)  # nothing is left of the cancellation

    asyncio.run(run())
    assert ended == ["work"]


def test_a_cancellation_from_elsewhere_is_no_client_that_left() -> None:
    async def run() -> None:
        async def receive() -> Message:
            await asyncio.sleep(20)
            return {"type": "http.disconnect"}

        async with asyncio.timeout(0.01):
            await while_connected(asyncio.sleep(20), receive)

    with pytest.raises(TimeoutError):
        asyncio.run(run())


def test_a_client_that_leaves_when_the_work_is_done_gets_no_cancellation_later() -> None:
    async def run() -> str:
        done = asyncio.Event()

        async def receive() -> Message:
            await done.wait()
            return {"type": "http.disconnect"}

        async def work() -> str:
            done.set()
            return "answer"

        answer = await while_connected(work(), receive)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return answer

    assert asyncio.run(run()) == "answer"


def test_a_body_whose_first_part_is_empty_is_given_back_once() -> None:
    async def run() -> None:
        app = App(Security(), lambda **_: None)
        request = app._request({"type": "http", "method": "POST", "path": "/", "headers": []}, gone)
        for size, held in ((0, 0), (3, 3), (0, 3), (2, 5)):
            request.hold(size)
            assert app.bodies.size == held
        request.leases.close()
        assert app.bodies.size == 0

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    asyncio.run(run())
