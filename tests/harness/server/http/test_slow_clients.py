"""Clients that hold connections: too many, that send slowly, or that do not read what they asked.

`seconds` is small, so that what takes that long is soon over.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from starlette.responses import Response
from starlette.routing import Route

from optimizer.harness.server.http.app import App
from optimizer.harness.server.http.connections import RATE, Connections, client_of, seconds_for
from optimizer.harness.server.http.request import HttpRequest, Security
from optimizer.harness.server.http.server import HttpServer
from tests.harness.server.http.test_server import echo

SECONDS = 0.6
UNBUFFERED = 1 << 27  # bytes, more than the kernel buffers for a connection (tcp_rmem, tcp_wmem)
REFUSED = (503, 0)  # the answer may be lost: the connection is closed with what was not read
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = HEAD + b"Content-Length: 9999\r\n\r\n"


def on_server(
    test: Callable[[int], Awaitable[None]],
    app: Any = echo,
    most: int = 20,
    of_client: int = 20,
    seconds: float = SECONDS,
) -> None:
    async def run() -> None:
        server = HttpServer(app, seconds, most, of_client)
        await server.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(30):
                await test(server.port)
        finally:
            async with asyncio.timeout(10):
                await server.close()

    asyncio.run(run())


async def opened(port: int, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await asyncio.sleep(0.03)  # until the server has it
    return reader, writer


async def status(reader: asyncio.StreamReader) -> int:
    """Of the next answer; 0 where the connection ends without one."""
    try:
        return int((await reader.readuntil(b"\r\n\r\n")).split()[1])
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0


async def waits(scope: Any, receive: Any, send: Any) -> None:
    """Answers when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


GET = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def test_connections_that_wait_give_way_to_new_ones_the_oldest_first() -> None:
    async def test(port: int) -> None:
        held = [await opened(port, part) for part in (b"", b"POST / HT", CHUNKED, CHUNKED + b"5")]
        for n in range(3):
            held.append(await opened(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"))
            assert await status(held[-1][0]) == 200
            assert await status(held[n][0]) == 0  # its place was taken
        for _, writer in held:
            writer.close()

    on_server(test, most=4, seconds=20.0)


def test_requests_that_are_answered_give_way_to_nobody() -> None:
    async def test(port: int) -> None:
        held = [await opened(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n") for _ in range(3)]
        reader, writer = await opened(port, GET)
        assert await status(reader) in REFUSED
        for _, other in (*held, (reader, writer)):
            other.close()

    on_server(test, waits, most=3)


def test_one_client_has_so_many_connections_and_no_more() -> None:
    async def test(port: int) -> None:
        held = [await opened(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n") for _ in range(2)]
        reader, writer = await opened(port, GET)
        assert await status(reader) in REFUSED
        for _, other in (*held, (reader, writer)):
            other.close()

    on_server(test, waits, of_client=2)


def test_a_body_that_comes_slowly_gets_408_and_its_connection_is_closed() -> None:
    """However it comes: all of it is drawn."""

    async def body(scope: Any, receive: Any, send: Any) -> None:
        app = App(Security(body_seconds=SECONDS), lambda **_: None)

        async def answer(request: HttpRequest) -> Response:
            return Response(await request.body())

        app._routes = [Route("/v1/embeddings", answer)]
        await app(scope, receive, send)

    async def attack(port: int, draw: random.Random) -> None:
        chunked = draw.random() < 0.5
        reader, writer = await opened(port, CHUNKED if chunked else WHOLE)

        async def drip() -> None:
            while not writer.is_closing():
                writer.write(b"1\r\na\r\n" if chunked else b"a" * draw.randint(1, 3))
                await asyncio.sleep(draw.uniform(0.01, 0.2))

        dripping = asyncio.create_task(drip())
        answer = await reader.read()  # until it is closed
        dripping.cancel()
        assert answer.startswith(b"HTTP/1.1 408 ")
        writer.close()

    async def test(port: int) -> None:
        await asyncio.gather(*(attack(port, random.Random(n)) for n in range(8)))

    on_server(test, body)


def test_a_body_that_nobody_reads_is_not_waited_for_either() -> None:
    async def early(scope: Any, receive: Any, send: Any) -> None:
        await Response(b"early", 404)(scope, receive, send)

    async def test(port: int) -> None:
        reader, writer = await opened(port, CHUNKED)
        assert await status(reader) == 404

        async def drip() -> None:
            while True:
                writer.write(b"1\r\na\r\n")
                await asyncio.sleep(0.1)

        dripping = asyncio.create_task(drip())
        assert await reader.read() == b"early"  # and the end
        dripping.cancel()
        writer.close()

    on_server(test, early)


def test_a_client_that_does_not_read_its_answer_is_not_waited_for() -> None:
    sent = asyncio.Event()

    async def large(scope: Any, receive: Any, send: Any) -> None:
        app = App(Security(body_seconds=SECONDS), lambda **_: None)

        async def answer(request: HttpRequest) -> Response:
            return Response(bytes(UNBUFFERED))

        app._routes = [Route("/", answer)]
        await app(scope, receive, send)
        sent.set()

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await sent.wait()  # although nothing was read
        await asyncio.sleep(3 * SECONDS)  # two checks of what is unread
        size = 0
        with suppress(ConnectionError):
            while part := await reader.read(1 << 20):  # read() takes `limit` bytes at a time
                size += len(part)
        assert size < UNBUFFERED
        writer.close()

    on_server(test, large)


def test_a_client_that_reads_none_of_many_answers_is_not_waited_for() -> None:
    """None of them is larger than what is written at once."""

    async def answered(scope: Any, receive: Any, send: Any) -> None:
        await Response(bytes(200_000))(scope, receive, send)

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(60 * b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.sleep(3 * SECONDS)
        with suppress(ConnectionResetError):
            assert len(await reader.read()) < 60 * 200_000
        writer.close()

    on_server(test, answered)


def test_a_request_has_half_of_the_time_and_more_at_the_rate() -> None:
    assert seconds_for(0, 10) == 5
    assert seconds_for(RATE, 10) == 6
    assert seconds_for(1 << 20, 10) == 10


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "", True),
    ],
)
def test_a_client_is_an_address_or_a_site_of_ipv6(one: str, other: str, same: bool) -> None:
    assert (client_of(one) == client_of(other)) is same


class Held:
    def __init__(self, owner: str, waiting: bool) -> None:
        self.owner, self.waiting, self.dropped = owner, waiting, False

    def drop(self) -> None:
        self.dropped = True


def test_whoever_has_the_most_connections_gives_way_the_longest_waiting_first() -> None:
    """For random crowds, and the limits always hold."""
    draw = random.Random(0)
    for _ in range(200):
        most, of_client = draw.randint(1, 8), draw.randint(1, 8)
        connections, inside = Connections(most, of_client), list[Held]()
        for _ in range(30):
            if inside and draw.random() < 0.2:
                connections.leave(inside.pop(draw.randrange(len(inside))))
            if inside and draw.random() < 0.2:
                inside.append(inside.pop(draw.randrange(len(inside))))
                connections.start_waiting(inside[-1])
            new = Held(draw.choice("abc"), draw.random() < 0.6)
            owners = [h.owner for h in inside]
            entered = connections.enter(new)
            (gone,) = [h for h in inside if h.dropped] or [None]
            full = owners.count(new.owner) >= of_client
            crowd = [h for h in inside if h.owner == new.owner] if full else inside
            rivals = [h for h in crowd if h.waiting] if full or len(inside) >= most else []
            if gone is not None:
                size = owners.count(gone.owner)
                assert size == max(owners.count(h.owner) for h in rivals)
                assert gone is next(h for h in rivals if h.owner == gone.owner)
            assert (gone is None) == (not rivals)
            inside = [h for h in inside if not h.dropped] + [new] * entered
            assert len(inside) <= most
            assert all([h.owner for h in inside].count(o) <= of_client for o in "abc")


def test_limits_that_drop_nobody_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Held, "drop", lambda _: None)
    with pytest.raises(AssertionError):
        test_whoever_has_the_most_connections_gives_way_the_longest_waiting_first()
