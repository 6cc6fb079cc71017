"""HTTP/1.1 for an ASGI application with the standard library alone, for where uvicorn is not.

One connection is one task. Requests have a bound on their head and on the time for it; bodies come
by Content-Length or in chunks, and are bounded by the application, which reads them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from .asgi import Message, Receive, Scope, Send
from .connections import Connections, client_of
from .listening import BACKLOG, addresses, listening

HEAD = 32 << 10  # bytes of a request line and its headers
PART = 64 << 10  # bytes of a body that are read at once
POLL = 0.01  # seconds between two looks at whether a client that waits is still there
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class BadRequest(Exception):
    """What came is not HTTP/1.1, or too large."""


class _Body:
    """The body of one request: `receive` gives its parts, then waits until the client is gone."""

    def __init__(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> None:
        self._reader, self.left, self.done = reader, 0, False
        self.broken = False  # what comes is no body
        lengths, coding = headers.get("content-length"), headers.get("transfer-encoding", "")
        self._chunked = coding.lower() == "chunked"
        if (coding and not self._chunked) or (coding and lengths is not None):
            raise BadRequest("transfer-encoding")
        if lengths is not None:
            if not re.fullmatch(r"[0-9]{1,15}", lengths):
                raise BadRequest("content-length")
            self.left = int(lengths)
        self.done = not self._chunked and self.left == 0
        self._delivered = False

    async def receive(self) -> Message:
        if not self._delivered or not self.done:
            try:
                data = b"" if self.done else await self._part()
            except BadRequest:
                self.broken = True
                return {"type": "http.disconnect"}
            except (OSError, EOFError):  # the client left before all of it came
                return {"type": "http.disconnect"}
            self._delivered = True
            return {"type": "http.request", "body": data, "more_body": not self.done}
        while not self._reader.at_eof():
            await asyncio.sleep(POLL)
        return {"type": "http.disconnect"}

    async def _part(self) -> bytes:
        if self._chunked and self.left == 0:
            line = (await self._reader.readuntil(b"\r\n")).partition(b";")[0].strip()
            if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", line):
                raise BadRequest("chunk")
            self.left = int(line, 16)
            if self.left == 0:
                while await self._reader.readuntil(b"\r\n") != b"\r\n":
                    pass  # trailers
                self.done = True
                return b""
        data = await self._reader.read(min(self.left, PART))
        if not data:
            raise ConnectionResetError
        self.left -= len(data)
        if self._chunked and self.left == 0 and await self._reader.readexactly(2) != b"\r\n":
            raise BadRequest("chunk")  # another reader would take another body
        self.done = not self._chunked and self.left == 0
        return data


class _Response:
    """The response to one request, sent in chunks where its length is not known before. seconds:
    limit for the client to read each part."""

    def __init__(self, writer: asyncio.StreamWriter, head_only: bool, seconds: float) -> None:
        self._writer, self._head_only, self._chunked = writer, head_only, False
        self._seconds = seconds
        self.complete = False

    async def send(self, message: Message, keep: bool) -> None:
        """keep: whether the connection takes another request. Raises OSError for a client that has
        gone, or does not read."""
        if message["type"] == "http.response.start":
            self._chunked = all(k != b"content-length" for k, _ in message["headers"])
            lines = [status_line(message["status"])]
            lines += [k + b": " + v for k, v in message["headers"]]
            lines += [b"transfer-encoding: chunked"] if self._chunked else []
            lines += [] if keep else [b"connection: close"]
            self._writer.write(b"\r\n".join([*lines, b"", b""]))
        elif not self._head_only:
            self._write(message["body"], message.get("more_body", False))
        try:
            async with asyncio.timeout(self._seconds):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise
        self.complete = "body" in message and not message.get("more_body", False)

    def _write(self, body: bytes, more: bool) -> None:
        if not self._chunked:
            self._writer.write(body)
            return
        if body:
            self._writer.write(b"%x\r\n%b\r\n" % (len(body), body))
        if not more:
            self._writer.write(b"0\r\n\r\n")


class _Connection:
    """One connection, see connections.py."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.owner = client_of(str((writer.get_extra_info("peername") or ("",))[0]))
        self._transport = writer.transport
        self.body: _Body | None = None  # of the request under way

    @property
    def waiting(self) -> bool:
        return self.body is None or not self.body.done

    def drop(self) -> None:
        self._transport.abort()


class Server:
    """Serves an application until `close`. seconds: for the head of a request to come, and between
    two requests of a connection. most, of_client: connections at once, in all and of one client."""

    def __init__(self, app: Application, seconds: float, most: int, of_client: int) -> None:
        self._app, self._seconds = app, seconds
        self._connections = Connections(most, of_client)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._busy: set[asyncio.Task[Any]] = set()
        self._closing = False
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen. port 0: any free one, `port` then says which. Raises InputError, MachineError."""
        self._servers = [
            await asyncio.start_server(self._connected, sock=listener, limit=HEAD, backlog=BACKLOG)
            for listener in listening(addresses(host, port))
        ]
        self.port = self._servers[0].sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Accept no connection more, let requests that run end, and close the rest."""
        self._closing = True
        for server in self._servers:
            server.close()
        for task in self._tasks - self._busy:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, connection = asyncio.current_task(), _Connection(writer)
        assert task is not None
        self._tasks.add(task)
        try:
            if not self._connections.enter(connection):
                writer.write(refusal(HTTPStatus.SERVICE_UNAVAILABLE))
                return
            while await self._exchange(reader, writer, connection) and not self._closing:
                connection.body = None
                self._connections.rest(connection)
        except BadRequest:
            writer.write(refusal(HTTPStatus.BAD_REQUEST))  # and no more: `_end` waits for it
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # the client is gone, too slow, or sends no end: it gets nothing more
        finally:
            self._connections.leave(connection)
            self._tasks.discard(task)
            self._busy.discard(task)
            await self._end(writer)

    async def _end(self, writer: asyncio.StreamWriter) -> None:
        """Close a connection, whether its client reads what is left or not."""
        writer.close()
        try:
            async with asyncio.timeout(self._seconds):
                await writer.wait_closed()
        except TimeoutError:
            writer.transport.abort()
        except OSError:
            pass

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection
    ) -> bool:
        """One request and its response; whether another may follow."""
        async with asyncio.timeout(self._seconds):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                raise BadRequest("head") from None
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        scope, headers = _scope(head, writer)
        body = connection.body = _Body(reader, headers)
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        keep = headers.get("connection", "").lower() != "close"
        response = _Response(writer, scope["method"] == "HEAD", self._seconds)

        async def send(message: Message) -> None:
            await response.send(message, keep and body.done and not self._closing)

        await self._app(scope, body.receive, send)
        self._busy.discard(task)
        if body.broken:
            raise BadRequest("body")
        return keep and body.done and response.complete


def status_line(code: int) -> bytes:
    return f"HTTP/1.1 {code} {HTTPStatus(code).phrase}".encode()


def _scope(head: bytes, writer: asyncio.StreamWriter) -> tuple[Scope, dict[str, str]]:
    lines = head[:-4].decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0") or words[1][:1] != "/":
        raise BadRequest("request line")
    pairs = []
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not TOKEN.fullmatch(name) or "\0" in value or "\n" in value:
            raise BadRequest("header")
        pairs.append((name.lower(), value.strip()))
    headers = dict(pairs)
    names = [name for name, _ in pairs]
    if any(names.count(n) > 1 for n in ("content-length", "transfer-encoding", "host")):
        raise BadRequest("a header comes twice")  # two readers would take two bodies
    path, _, query = words[1].partition("?")
    if words[2] == "HTTP/1.0":
        headers["connection"] = "close"
    return {
        "type": "http",
        "method": words[0],
        "path": unquote(path, errors="replace"),
        "query_string": query.encode("latin-1"),
        "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in pairs],
        "client": writer.get_extra_info("peername"),
        "server": writer.get_extra_info("sockname"),
    }, headers


def refusal(status: HTTPStatus) -> bytes:
    """All that is sent where a connection is closed at once."""
    return status_line(status) + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
