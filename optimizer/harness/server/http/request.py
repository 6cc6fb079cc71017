"""A request over HTTP: its access rules, its body within limits, and its answer."""

from __future__ import annotations

import asyncio
import hmac
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as Received
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Send

from ..caches.completion_cache import HEADER
from ..inference import Service
from ..options import VALUES
from ..refusals import (
    ForbiddenError,
    MethodError,
    OverloadError,
    RequestError,
    SlowClientError,
    TokenError,
    TooLargeError,
)
from ..request import Request, Result
from ..tensors import write_json
from ..versions.versions import Served
from ..worker_threads import SMALL, WorkerThreads
from .connections import RATE, seconds_for
from .hosts import Hosts, is_loopback

Value = TypeVar("Value")

OPEN = ("live", "ready", "healthz", "readyz", "docs")  # routes without a token: probes, the page
ENCODINGS = {"gzip": 31, "deflate": 15}  # zlib's window bits of each


@dataclass(frozen=True)
class Security:
    """Limits that every HTTP request must keep.

    token: bearer token that clients must send; "" for none
    largest: maximum bytes of a body
    body_seconds: maximum seconds to receive a body
    values: maximum values in a JSON body, see server/json_size.py
    hosts: accepted names of the server; None accepts any
    """

    token: str = ""
    largest: int = 16 << 20
    body_seconds: float = 10.0
    values: int = VALUES
    hosts: Hosts | None = None


class Bodies:
    """Counter of the bytes of all request bodies that a server holds.

    largest: maximum bytes
    """

    def __init__(self, largest: int) -> None:
        self._largest, self.size = largest, 0

    def add(self, size: int) -> None:
        """Count `size` more bytes of request bodies that the server holds. Raises OverloadError
        above the limit."""
        if self.size + size > self._largest:
            raise OverloadError("the server holds too many large requests", retry_after=1.0)
        self.size += size

    @contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Count `size` bytes of a request's body while a `with` lasts. Raises as `add`."""
        self.add(size)
        try:
            yield
        finally:
            self.size -= size


@dataclass(kw_only=True)
class HttpRequest(Request):
    """A request over HTTP.

    received: method, path, headers and body, as starlette received them
    size: bytes held for its body: as received, plus as unpacked
    leases: leases of versions, queue place and counted bytes, given back when closed
    """

    received: Received
    security: Security
    worker_threads: WorkerThreads
    bodies: Bodies
    size: int = 0
    leases: ExitStack = field(default_factory=ExitStack)

    def lease(self, served: Served, name: str = "") -> Service:
        """Lease the model's version that answers this request, and return its service.

        The version is not drained before `leases` is closed.

        name: as in Service.take
        """
        service = self.leases.enter_context(served.lease())
        service.take(self, name)
        return service

    def admit(self, service: Service) -> None:
        """Ask the model's scheduler to admit this request. Raises RequestError if it is refused."""
        if self.metrics is None:  # a refusal is counted among its requests
            service.take(self)
        self.place = service.admit(self.client)
        if self.place is not None:
            self.leases.callback(self.place.close)

    def accept(self, route: str, method: str) -> None:
        """Record a request's route and check its method and token.

        Raises MethodError for another method, TokenError without the token.
        """
        self.route = route
        if self.received.method != method and (method, self.received.method) != ("GET", "HEAD"):
            raise MethodError(method)
        token = self.security.token
        if not token or route in OPEN:
            return
        scheme, _, value = self.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(value.strip().encode("utf-8"), token.encode("utf-8"))
        if scheme.lower() != "bearer" or not right:
            raise TokenError("a bearer token is needed")

    def accept_owner(self, route: str) -> None:
        """Accept a POST request of the server's owner, as `accept`.

        Raises ForbiddenError also if the client is on another machine, or the server has no token.
        """
        self.accept(route, "POST")
        if not self.security.token:
            raise ForbiddenError("models are changed with a token alone: serve --token-file FILE")
        if not is_loopback(self.client):
            raise ForbiddenError("models are changed from this machine alone")

    async def body(self) -> bytes:
        """Receive the request's body, as sent; `parse` unpacks it. Raises RequestError,
        ClientDisconnect."""
        security, size, parts = self.security, 0, list[bytes]()
        encoding_of(self.headers)
        if (whole_header(self.headers, "content-length") or 0) > security.largest:
            raise _too_large(security.largest)
        start = asyncio.get_running_loop().time()

        def limit() -> float:
            return start + seconds_for(size, security.body_seconds)

        try:
            async with asyncio.timeout_at(limit()) as timeout:
                async for part in self.received.stream():
                    size += len(part)
                    if size > security.largest:
                        raise _too_large(security.largest)
                    self.hold(len(part))
                    parts.append(part)
                    timeout.reschedule(limit())
        except TimeoutError:
            raise SlowClientError(
                f"the body did not come within {security.body_seconds:g} s, "
                f"or at {RATE} bytes a second"
            ) from None
        return b"".join(parts)

    async def parse(self, body: bytes, parse: Callable[[bytes], Value]) -> Value:
        """Unpack a request's body and return parse(body), outside of the event loop if it is large.

        Raises RequestError.
        """
        encoding = encoding_of(self.headers)
        if encoding:
            work = partial(inflate, body, encoding, self.security.largest)
            body = await self.worker_threads.run(self.client, work)
            self.hold(len(body))
        if len(body) <= SMALL:
            return parse(body)
        return await self.worker_threads.run(self.client, partial(parse, body))

    def hold(self, size: int) -> None:
        """Count bytes of this request among those that the server holds, until it is answered.
        Raises OverloadError."""
        self.bodies.add(size)
        if size and not self.size:
            self.leases.callback(lambda: self.bodies.add(-self.size))
        self.size += size

    def timeout(self) -> float | None:
        """Return the seconds of the header X-Request-Timeout; None without it. Raises
        RequestError."""
        value = self.headers.get("x-request-timeout")
        if value is None:
            return None
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise RequestError("header x-request-timeout is not a number of seconds")
        return seconds

    def finish(self, response: Response, result: Result) -> Response:
        """Count an answered request in the metrics; returns the response with headers about
        truncation and the cache."""
        if result.truncated:
            response.headers["x-truncated-texts"] = str(result.truncated)
        if result.cache:
            response.headers[HEADER] = result.cache
        self.result = result
        if self.metrics is not None:
            self.metrics.success.add()
        return response

    async def while_connected(self, work: Awaitable[Value]) -> Value:
        """Return the result of `work` for a request, which is cancelled if the client leaves.

        Raises ClientDisconnect.
        """
        return await while_connected(work, self.received.receive)


class Document(JSONResponse):
    """The server's HTTP response with a JSON body."""

    def render(self, content: Any) -> bytes:
        return write_json(content)


class EventStream(StreamingResponse):
    """The server's response of server-sent events, sent as they are generated.

    complete: True once all events were sent
    """

    complete = False
    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)
        self.complete = True


def cache_control(headers: Mapping[str, str]) -> frozenset[str]:
    """Return the directives of a request's cache-control header (RFC 9111, 5.2.1) in lower case."""
    return frozenset(w.strip().lower() for w in headers.get("cache-control", "").split(","))


def whole_header(headers: Mapping[str, str], name: str) -> int | None:
    """Return the value of a request's header as a whole number from 0; None without the header.

    Raises RequestError for other values.
    """
    value = headers.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 16):
        raise RequestError(f"header {name} is not a whole number")
    return int(value)


def encoding_of(headers: Mapping[str, str]) -> str:
    """Return the content coding of a request's body; "" for none. Raises RequestError for unknown
    ones."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity" and encoding not in ENCODINGS:
        raise RequestError(f"unknown content-encoding; accepted: {', '.join(ENCODINGS)}")
    return "" if encoding == "identity" else encoding


def inflate(data: bytes, encoding: str, largest: int) -> bytes:
    """Decompress a request's body to at most `largest` bytes. Raises RequestError."""
    unpacker = zlib.decompressobj(ENCODINGS[encoding])
    try:
        body = unpacker.decompress(data, largest + 1)
    except zlib.error:
        raise RequestError(f"the body is not {encoding}") from None
    if len(body) > largest:
        raise TooLargeError(f"the body is larger than {largest} bytes when unpacked (--max-body)")
    if not unpacker.eof or unpacker.unused_data:
        raise RequestError(f"the body is not one complete {encoding} stream")
    return body


async def while_connected(work: Awaitable[Value], receive: Receive) -> Value:
    """Return the result of `work` for a request, which is cancelled if the client leaves.

    receive: ASGI function that reports the disconnection

    Raises ClientDisconnect.
    """
    task, left = asyncio.current_task(), False
    assert task is not None

    def leave(watch: asyncio.Future[None]) -> None:
        nonlocal left
        if not watch.cancelled():
            watch.exception()  # whatever it was: nothing more comes from there
            left = task.cancel()

    watch = asyncio.ensure_future(_disconnection(receive))
    watch.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if left and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watch.remove_done_callback(leave)
        watch.cancel()


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(largest: int) -> TooLargeError:
    return TooLargeError(f"the body is larger than {largest} bytes (--max-body)")
