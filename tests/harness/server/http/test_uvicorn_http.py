"""HTTP/1.1 by uvicorn, where some requests are refused before a task is made of them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from optimizer.harness.server.http.asgi import PLACE, Response, Scope
from optimizer.harness.server.http.uvicorn_http import Server, installed
from tests.harness.server.http.test_plain_http import echo

pytestmark = pytest.mark.skipif(
    not installed(), reason="uvicorn and httptools are not installed: pip install '.[serve]'"
)
BUSY = Response(b'"busy"', 429, headers={"retry-after": "1"})


def post(path: str, body: bytes = b"hi", more: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST %b HTTP/1.1\r\n%b%b\r\n%b" % (path.encode(), length, more, body)


def refused(scope: Scope, size: int) -> Response | None:
    """The paths below /busy."""
    assert size == 2
    return BUSY if scope["path"].startswith("/busy") else None


def on_port(
    test: Callable[[int], Awaitable[None]], app: Any = echo, seconds: float = 5.0, most: int = 10
) -> None:
    async def run() -> None:
        server = Server(app, seconds, most, most, refused)
        await server.start("127.0.0.1", 0)
        try:
            await test(server.port)
        finally:
            await server.close()

    asyncio.run(run())


async def answered(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """The next answer's status and body."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).lower()
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    body = await reader.readexactly(length)
    return int(head.split()[1]), json.loads(body) if b"service" not in body.lower() else None


def test_a_connection_is_used_on_after_a_refusal() -> None:
    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(post("/busy?x"))
            assert await answered(reader) == (429, "busy")
            writer.write(post("/a"))
            assert await answered(reader) == (200, ["POST", "/a", "hi"])
        writer.close()

    on_port(test)


def test_requests_sent_together_are_answered_in_order_whichever_are_refused() -> None:
    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/busy") + post("/a") + post("/busy/too"))
        assert await answered(reader) == (429, "busy")
        assert await answered(reader) == (200, ["POST", "/a", "hi"])
        assert await answered(reader) == (200, ["POST", "/busy/too", "hi"])  # the app's own
        writer.write(post("/a") + post("/busy"))
        assert await answered(reader) == (200, ["POST", "/a", "hi"])
        assert await answered(reader) == (200, ["POST", "/busy", "hi"])
        writer.write(post("/busy") + post("/busy/too"))  # one at each read
        assert await answered(reader) == (429, "busy")
        assert await answered(reader) == (200, ["POST", "/busy/too", "hi"])
        writer.close()

    on_port(test)


def test_a_refusal_waits_for_the_answer_before_it() -> None:
    go = asyncio.Event()

    async def waits(scope: Scope, receive: Any, send: Any) -> None:
        await go.wait()
        await echo(scope, receive, send)

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/a"))
        await asyncio.sleep(0.05)
        writer.write(post("/busy"))
        await asyncio.sleep(0.05)
        go.set()
        assert await answered(reader) == (200, ["POST", "/a", "hi"])
        assert await answered(reader) == (200, ["POST", "/busy", "hi"])
        writer.close()

    on_port(test, waits)


def test_a_request_in_chunks_is_refused_and_the_next_one_answered() -> None:
    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /busy HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"1\r\nh\r\n1\r\ni\r\n0\r\n\r\n" + post("/a"))
        assert await answered(reader) == (429, "busy")
        assert await answered(reader) == (200, ["POST", "/a", "hi"])
        writer.close()

    on_port(test)


def test_a_body_that_comes_later_is_the_application_s() -> None:
    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        whole = post("/busy")
        for part in (whole[:-1], whole[-1:]):
            writer.write(part)
            await asyncio.sleep(0.05)
        assert await answered(reader) == (200, ["POST", "/busy", "hi"])
        writer.write(post("/busy", more=b"Expect: 100-continue\r\n")[:-2])
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(b"hi")
        assert await answered(reader) == (200, ["POST", "/busy", "hi"])
        writer.close()

    on_port(test)


def test_what_comes_after_a_refusal_and_is_no_http_ends_the_connection() -> None:
    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/busy") + b"POST /busy HTTP/1.1\r\nContent-Length: x\r\n\r\n")
        assert await answered(reader) == (429, "busy")
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 400 ")
        writer.close()

    on_port(test)


def test_an_answer_that_takes_longer_than_a_connection_may_rest_comes_after_a_refusal() -> None:
    async def slow(scope: Scope, receive: Any, send: Any) -> None:
        await asyncio.sleep(1.5)
        await echo(scope, receive, send)

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/busy") + post("/a"))
        assert await answered(reader) == (429, "busy")
        assert await answered(reader) == (200, ["POST", "/a", "hi"])
        writer.close()

    on_port(test, slow, seconds=1.0)


def test_a_connection_that_rests_after_a_refusal_is_closed() -> None:
    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/busy"))
        assert await answered(reader) == (429, "busy")
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()

    on_port(test, seconds=1.0)


@pytest.mark.parametrize("last", [b"Connection: close\r\n", b""])
def test_a_client_that_wants_its_connection_closed_has_it_closed(last: bytes) -> None:
    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = post("/busy", more=last)
        writer.write(request if last else request.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert await answered(reader) == (200, ["POST", "/busy", "hi"])
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()

    on_port(test)


def test_a_client_that_sends_a_head_too_slowly_is_closed_whichever_request_it_is() -> None:
    async def test(port: int) -> None:
        for before in (b"", post("/a"), post("/busy")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(before)
            if before:
                await answered(reader)
            writer.write(b"POST /a HT")
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()

    on_port(test, seconds=1.0)


def test_a_head_that_comes_in_parts_has_its_time_from_its_first_byte() -> None:
    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = post("/a")
        for part in (request[:20], request[20:]):
            await asyncio.sleep(0.4)
            writer.write(part)
        assert await answered(reader) == (200, ["POST", "/a", "hi"])
        writer.close()

    on_port(test, seconds=1.0)


async def at_once(scope: Scope, receive: Any, send: Any) -> None:
    """Answers before the body has come."""
    del scope, receive
    await Response(b'"early"').send(send)


class Place:
    open = True

    def close(self) -> None:
        self.open = False


def test_a_place_is_closed_where_no_task_is_made() -> None:
    """httptools reads no URL of more than 65,535 bytes; one that begins in the middle of a read is
    longer than a head may be."""
    places = list[Place]()

    def admitted(scope: Scope, size: int) -> None:
        del size
        if len(scope["path"]) > 10:
            scope[PLACE] = Place()
            places.append(scope[PLACE])

    async def run() -> None:
        server = Server(at_once, 5.0, 10, 10, admitted)
        await server.start("127.0.0.1", 0)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(post("/a", b"hello")[:-2])
            assert await answered(reader) == (200, "early")
            writer.write(b"lo" + post("/" + 66_000 * "a"))
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer.count(b"HTTP/1.1 400 ") == 1
            writer.close()
        finally:
            await server.close()

    asyncio.run(run())
    assert [place.open for place in places] == [False]
