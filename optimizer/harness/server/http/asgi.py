"""What a request and a response are on ASGI 3, within limits of size and time."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    MutableMapping,
)
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..refusals import RequestError, SlowClientError, TooLargeError
from .connections import RATE, seconds_for

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

Value = TypeVar("Value")
JSON = "application/json"
COMPACT = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps makes one at each call
PART = 256 << 10  # bytes of an answer that are written at once
ENCODINGS = {"gzip": 31, "deflate": 15}  # zlib's window bits of each


@dataclass
class Response:
    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)

    def pairs(self) -> list[tuple[bytes, bytes]]:
        """All its headers, as they are sent."""
        headers = {
            "content-type": self.content_type,
            "content-length": str(len(self.body)),
            **self.headers,
        }
        return [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]

    async def send(self, send: Send, seconds: float | None = None) -> None:
        """Send it. seconds: limit for each PART of a large body to be read; None: no limit. Raises
        Disconnected beyond it."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.pairs()})
        at = 0
        while len(self.body) - at > PART:  # one after the other, as the client reads them
            await _within(seconds, send(_body(self.body[at : at + PART], more=True)))
            at += PART
        await send(_body(self.body[at:] if at else self.body, more=False))


Refused = Callable[[Scope, int], Response | None]
"""App.refused: what refuses a request by its scope and the bytes of its whole body, or None. The
scope of one that is not refused may have a PLACE, which the application closes; where it is not
called after all, the server."""

PLACE = "optimize.place"


def document(value: Mapping[str, Any], status: int = 200) -> Response:
    """A JSON answer."""
    return Response(COMPACT(value).encode(), status)


class Disconnected(Exception):
    """The client has gone."""


def headers_of(scope: Scope) -> dict[str, str]:
    """By name in lower case; of a name that comes twice the last."""
    return {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}


def cache_control(headers: Mapping[str, str]) -> frozenset[str]:
    """The words of a request's cache-control (RFC 9111, 5.2.1), in lower case."""
    return frozenset(w.strip().lower() for w in headers.get("cache-control", "").split(","))


def whole_header(headers: Mapping[str, str], name: str) -> int | None:
    """A header that is a whole number from 0; None where it is missing. Raises RequestError."""
    value = headers.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 16):
        raise RequestError(f"header {name} is not a whole number")
    return int(value)


def encoding_of(headers: Mapping[str, str]) -> str:
    """Name of the coding that a body is packed with; "" for none. Raises RequestError."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity" and encoding not in ENCODINGS:
        raise RequestError(f"unknown content-encoding; accepted: {', '.join(ENCODINGS)}")
    return "" if encoding == "identity" else encoding


async def read_body(
    headers: Mapping[str, str],
    receive: Receive,
    hold: Callable[[int], None],
    bounds: tuple[int, float],
) -> bytes:
    """Receive a body, packed as it is. hold: receives the size of each part before it is kept.
    bounds: bytes of the body, and seconds for all of it. Raises RequestError, Disconnected."""
    largest, seconds = bounds
    encoding_of(headers)
    if (whole_header(headers, "content-length") or 0) > largest:
        raise TooLargeError(f"the body is larger than {largest} bytes (--max-body)")
    start, size = asyncio.get_running_loop().time(), 0
    parts, more = list[bytes](), True
    try:
        while more:
            async with asyncio.timeout_at(start + seconds_for(size, seconds)):
                message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > largest:
                raise TooLargeError(f"the body is larger than {largest} bytes (--max-body)")
            hold(len(part))
            parts.append(part)
    except TimeoutError:
        raise SlowClientError(
            f"the body did not come within {seconds:g} s, or at {RATE} bytes a second"
        ) from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def inflated(data: bytes, encoding: str, largest: int) -> bytes:
    """What was packed: never more than `largest` bytes, however little it is packed into. Raises
    RequestError."""
    unpacker = zlib.decompressobj(ENCODINGS[encoding])
    try:
        whole = unpacker.decompress(data, largest + 1)
    except zlib.error:
        raise RequestError(f"the body is not {encoding}") from None
    if len(whole) > largest:
        raise TooLargeError(f"the body is larger than {largest} bytes when unpacked (--max-body)")
    if not unpacker.eof or unpacker.unused_data:
        raise RequestError(f"the body is not one whole {encoding} stream")
    return whole


async def while_connected(work: Awaitable[Value], receive: Receive) -> Value:
    """The result of the work, which is cancelled when the client goes away. Raises Disconnected."""
    task, left = asyncio.current_task(), False
    assert task is not None

    def leave(watch: asyncio.Future[None]) -> None:
        nonlocal left
        if not watch.cancelled():
            watch.exception()  # whatever it was: nothing more comes from there
            left = task.cancel()

    watch = asyncio.ensure_future(_gone(receive))
    watch.add_done_callback(leave)
    try:
        return await work  # in this task: one more would be two more turns of the event loop
    except asyncio.CancelledError:
        if left and not task.uncancel():
            raise Disconnected from None
        raise
    finally:
        watch.remove_done_callback(leave)
        watch.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass
class Stream:
    """A response that is sent as it is made. parts: the bytes, each sent at once. seconds: that
    the client may take to read one. close: called at the end, however it came."""

    parts: AsyncGenerator[bytes]
    receive: Receive
    seconds: float
    close: Callable[[], None]
    status: int = 200
    content_type: str = "text/event-stream; charset=utf-8"
    headers: dict[str, str] = field(default_factory=dict)

    async def send(self, send: Send) -> None:
        """Raises Disconnected when the client goes away, or does not read."""
        headers = {"content-type": self.content_type, "cache-control": "no-store", **self.headers}
        encoded = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        watch = asyncio.ensure_future(_gone(self.receive))
        try:
            await _within(
                self.seconds,
                send({"type": "http.response.start", "status": self.status, "headers": encoded}),
            )
            async for part in _until(watch, self.parts):
                await _within(self.seconds, send(_body(part, more=True)))
            await _within(self.seconds, send(_body(b"", more=False)))
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await self.parts.aclose()
            self.close()


async def _within(seconds: float | None, sent: Awaitable[None]) -> None:
    """Raises Disconnected where it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            await sent
    except (TimeoutError, OSError):
        raise Disconnected from None


def _body(part: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": part, "more_body": more}


async def _until(gone: asyncio.Future[None], parts: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    """The parts, until there are no more; raises Disconnected as soon as `gone` is done."""
    while True:
        following = asyncio.ensure_future(anext(parts, None))
        try:
            await asyncio.wait((following, gone), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                raise Disconnected
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        part = following.result()
        if part is None:
            return
        yield part
