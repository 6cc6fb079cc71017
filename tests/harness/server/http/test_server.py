"""HTTP/1.1 over a socket, byte by byte."""

import asyncio
import http.client
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from optimizer.harness.server.http.app import App
from optimizer.harness.server.http.request import Security
from optimizer.harness.server.http.server import HEAD, HttpServer
from optimizer.harness.server.inference import Service
from optimizer.harness.server.observe.metrics import Metrics
from optimizer.harness.server.versions.versions import Served


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what came."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    answer = json.dumps([scope["method"], scope["path"], body.decode("latin-1")]).encode()
    length = str(len(answer)).encode()
    head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
    await send(head)
    await send({"type": "http.response.body", "body": answer})


def on_port(
    test: Callable[[int], Awaitable[None]], app: Any = echo, seconds: float = 5.0, most: int = 10
) -> None:
    async def run() -> None:
        server = HttpServer(app, seconds, most, most)
        await server.start("127.0.0.1", 0)
        try:
            await test(server.port)
        finally:
            await server.close()

    asyncio.run(run())


async def exchanged(port: int, data: bytes) -> bytes:
    """All that comes back until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


def bodies(answers: bytes) -> list[Any]:
    """The echoed parts of the answers, by the lengths in their heads."""
    found = []
    while answers:
        head, _, rest = answers.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        found.append(json.loads(rest[:length]))
        answers = rest[length:]
    return found


def test_requests_of_one_connection_are_answered_in_order() -> None:
    async def test(port: int) -> None:
        first = b"POST /a%20b HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"
        second = b"POST /c?d HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        second += b"2;x=y\r\nab\r\n3\r\ncde\r\n0\r\nTrailer: 1\r\n\r\n"
        last = b"GET /e HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        found = bodies(await exchanged(port, first + second + last))
        assert found == [["POST", "/a b", "hi"], ["POST", "/c", "abcde"], ["GET", "/e", ""]]

    on_port(test)


def test_python_s_client_is_served_on_a_connection_that_stays_open() -> None:
    async def test(port: int) -> None:
        def ask() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            for text in ("one", "two"):
                connection.request("POST", "/", text)
                assert json.loads(connection.getresponse().read())[2] == text
            connection.close()

        await asyncio.to_thread(ask)

    on_port(test)


BAD = {
    "words": b"GET\r\n\r\n",
    "version": b"GET / HTTP/2\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "header": b"GET / HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n",
    "space in a name": b"GET / HTTP/1.1\r\nHost: a\r\na b: c\r\n\r\n",
    "negative length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n"
    b"Content-Length: 2\r\n\r\nab",
    "coding": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
    "no end of a chunk": b"POST / HTTP/1.1\r\nHost: a\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n1\r\naXY0\r\n\r\n",
    "chunk": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "long head": b"GET / HTTP/1.1\r\nHost: a\r\na: " + b"b" * (2 * HEAD),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_request_is_refused_and_the_connection_closed(name: str) -> None:
    async def test(port: int) -> None:
        assert (await exchanged(port, BAD[name])).startswith(b"HTTP/1.1 400 ")
        good = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        assert bodies(await exchanged(port, good)) == [["GET", "/", ""]]

    on_port(test)


def test_a_client_that_sends_its_head_too_slowly_is_closed() -> None:
    async def test(port: int) -> None:
        assert await exchanged(port, b"GET / HT") == b""

    on_port(test, seconds=0.2)


def test_a_client_that_sends_half_a_body_and_closes_gets_nothing_and_harms_nothing() -> None:
    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()

    on_port(test)


def test_an_application_learns_that_its_client_has_gone() -> None:
    left = asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async def test(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.wait_for(left.wait(), 10)

    on_port(test, waits)


def test_closing_lets_a_request_that_runs_end() -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        started.set()
        await go.wait()
        await echo(scope, receive, send)

    async def run() -> None:
        server = HttpServer(slow, 5.0, 10, 10)
        await server.start("127.0.0.1", 0)
        answer = asyncio.create_task(exchanged(server.port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"))
        await started.wait()
        closing = asyncio.create_task(server.close())
        await asyncio.sleep(0.05)
        go.set()
        assert bodies(await answer) == [["GET", "/", ""]]
        await closing

    asyncio.run(run())


def test_a_body_that_is_none_or_does_not_come_is_no_bug() -> None:
    lines: list[dict[str, Any]] = []

    def say(**fields: Any) -> None:
        lines.append(fields)

    app = App(Security(), say)
    fields = {"names": ["m"], "name": "m", "version": "1", "take": Service.take}
    service: Any = type("Stub", (), fields)()
    metrics = Metrics({})
    service.engine = type("Engine", (), {"metrics": metrics, "draining": False})()

    async def test(port: int) -> None:
        app.versions.add(Served(service, "", lambda: None))
        head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\n"
        chunked = head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
        assert (await exchanged(port, chunked)).startswith(b"HTTP/1.1 400")
        for sent in (b"Content-Length: 9\r\n\r\nhalf", b"Transfer-Encoding: chunked\r\n\r\n5\r\na"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + sent)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        assert [line["status"] for line in lines] == [499] * 3

    on_port(test, app)


def post(path: str, body: bytes = b"hi", more: bytes = b"") -> bytes:
    length = b"Host: a\r\nContent-Length: %d\r\n" % len(body)
    return b"POST %b HTTP/1.1\r\n%b%b\r\n%b" % (path.encode(), length, more, body)


def test_a_body_of_two_lengths_is_refused_and_its_connection_closed() -> None:
    """A proxy may read the other one, and take the rest for a request."""
    app = App(Security(), lambda **_: None)

    async def test(port: int) -> None:
        both = b"Transfer-Encoding: chunked\r\n"
        answer = await exchanged(port, post("/", b"0\r\n\r\n", both) + post("/smuggled"))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1

    on_port(test, app)


def test_a_head_of_more_bytes_than_the_limit_is_refused_although_it_comes_at_once() -> None:
    async def test(port: int) -> None:
        request = post("/", more=b"a: " + b"b" * (3 * HEAD) + b"\r\n")
        assert (await exchanged(port, request)).startswith(b"HTTP/1.1 400 ")

    on_port(test)


def test_a_connection_that_rests_is_closed() -> None:
    async def test(port: int) -> None:
        assert bodies(await exchanged(port, post("/"))) == [["POST", "/", "hi"]]

    on_port(test, seconds=1.0)


@pytest.mark.parametrize("last", [b"Connection: close\r\n", b""])
def test_a_client_that_wants_its_connection_closed_has_it_closed(last: bytes) -> None:
    async def test(port: int) -> None:
        request = post("/", more=last)
        request = request if last else request.replace(b"HTTP/1.1", b"HTTP/1.0")
        assert bodies(await exchanged(port, request)) == [["POST", "/", "hi"]]

    on_port(test, seconds=20.0)


def test_a_second_head_that_comes_too_slowly_is_closed() -> None:
    async def test(port: int) -> None:
        assert bodies(await exchanged(port, post("/") + b"POST /a HT")) == [["POST", "/", "hi"]]

    on_port(test, seconds=1.0)


def test_a_head_that_comes_in_parts_has_its_time_from_its_first_byte() -> None:
    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = post("/a", more=b"Connection: close\r\n")
        for part in (request[:20], request[20:]):
            await asyncio.sleep(0.4)
            writer.write(part)
        assert bodies(await asyncio.wait_for(reader.read(), 10)) == [["POST", "/a", "hi"]]
        writer.close()

    on_port(test, seconds=1.0)
