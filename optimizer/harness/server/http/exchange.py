"""One request while it is answered."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ..beside import SMALL, Beside
from ..caches.completion_cache import HEADER
from ..inference import Service
from ..options import VALUES
from ..refusals import ForbiddenError, MethodError, OverloadError, RequestError, TokenError
from ..scheduling.engine import Call, Place, Result, Times
from ..versions.versions import Served
from .asgi import Receive, Response, encoding_of, inflated, read_body
from .hosts import Hosts, is_loopback

Value = TypeVar("Value")

OPEN = ("live", "ready", "healthz", "readyz")  # paths that need no token: a cluster asks them


@dataclass(frozen=True)
class Security:
    """token: what a client's `Authorization: Bearer` must hold; "" for no such check. largest:
    bytes of a body. body_seconds: in which it must have come. values: that a body may hold, see
    server/json_size.py. hosts: accepted names of the server; None: any."""

    token: str = ""
    largest: int = 16 << 20
    body_seconds: float = 10.0
    values: int = VALUES
    hosts: Hosts | None = None


class Bodies:
    """Count of the bytes of all bodies that a server keeps. largest: number of them, at most."""

    def __init__(self, largest: int) -> None:
        self._largest, self.size = largest, 0

    def add(self, size: int) -> None:
        """Count `size` bytes more. Raises OverloadError above the limit."""
        if self.size + size > self._largest:
            raise OverloadError("the server keeps too many large requests", retry_after=1.0)
        self.size += size

    @contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Count `size` bytes for the time of a `with`. Raises as `add`."""
        self.add(size)
        try:
            yield
        finally:
            self.size -= size


@dataclass(kw_only=True)
class Record:
    """What a request leaves in the log, the metrics and the spans, over HTTP and gRPC. route: what
    it asks for, as a log and its errors need it; never the path itself, which is the client's.
    headers: HTTP's, or gRPC's metadata. service: the version that answers, once it is known."""

    id: str
    headers: Mapping[str, str]
    route: str = "unknown"
    log: dict[str, Any] = field(default_factory=dict)
    times: Times | None = None
    service: Service | None = None

    def answered(self, result: Result) -> None:
        """Say of the answer what is no text."""
        self.log, self.times = counts(result), result.times


@dataclass
class Exchange(Record):
    """A request over HTTP. leases: the versions that it may submit work to, until they are
    closed."""

    method: str
    parts: list[str]
    client: str
    receive: Receive
    security: Security
    beside: Beside
    bodies: Bodies
    size: int = 0  # bytes of its body, as it came and unpacked
    streamed: Result | None = None  # complete once the stream has ended
    place: Place | None = None  # closed with the leases
    leases: ExitStack = field(default_factory=ExitStack)

    def lease(self, served: Served) -> Service:
        """The version that answers; not drained before the leases are closed."""
        self.service = self.leases.enter_context(served.lease())
        return self.service

    def admit(self, service: Service) -> None:
        """Have this model admit the request, unless one has. Raises RequestError."""
        if self.place is None:
            self.put(service.admit(self.client))

    def put(self, place: Place | None) -> None:
        """The request has this place until it is answered."""
        if place is not None:
            self.place = place
            self.leases.callback(place.close)

    def call(self, service: Service, parameters: Mapping[str, Any]) -> Call:
        """Who asks this model, and until when. Raises RequestError."""
        return service.call(self.client, parameters, self.timeout(), self.place)

    def accept(self, route: str, method: str) -> None:
        """Raises MethodError, and TokenError where one is needed."""
        self.route = route
        if self.method != method and not (method == "GET" and self.method == "HEAD"):
            raise MethodError(method)
        token = self.security.token
        if not token or route in OPEN:
            return
        scheme, _, value = self.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(value.strip().encode("utf-8"), token.encode("utf-8"))
        if scheme.lower() != "bearer" or not right:
            raise TokenError("a bearer token is needed")

    def accept_owner(self, route: str) -> None:
        """Raises ForbiddenError for whoever is not on this machine with the server's token, and as
        `accept`."""
        self.accept(route, "POST")
        if not self.security.token:
            raise ForbiddenError("models are changed with a token alone: serve --token-file FILE")
        if not is_loopback(self.client):
            raise ForbiddenError("models are changed from this machine alone")

    async def body(self) -> bytes:
        """The body as it came, for `parsed`. Raises RequestError, Disconnected."""
        security = self.security
        return await read_body(
            self.headers, self.receive, self.hold, (security.largest, security.body_seconds)
        )

    async def parsed(self, body: bytes, parse: Callable[[bytes], Value]) -> Value:
        """Unpack the body and parse it, beside the event loop where it is large. Raises
        RequestError."""
        encoding = encoding_of(self.headers)
        if encoding:
            work = partial(inflated, body, encoding, self.security.largest)
            body = await self.beside.run(self.client, work)
            self.hold(len(body))
        if len(body) <= SMALL:
            return parse(body)
        return await self.beside.run(self.client, partial(parse, body))

    def hold(self, size: int) -> None:
        """Count bytes of this request among those that the server keeps, until it is answered.
        Raises OverloadError."""
        self.bodies.add(size)
        if size and not self.size:  # once: a first part may be empty
            self.leases.callback(lambda: self.bodies.add(-self.size))
        self.size += size

    def timeout(self) -> float | None:
        """The header X-Request-Timeout, in seconds. Raises RequestError."""
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

    def finished(self, response: Response, result: Result) -> Response:
        """Count an answer, and say of it what is no text."""
        if result.truncated:  # the model read the beginning of so many texts
            response.headers["x-truncated-texts"] = str(result.truncated)
        if result.cache:
            response.headers[HEADER] = result.cache
        self.answered(result)
        if self.service is not None:
            self.service.engine.metrics.success.add()
        return response


def counts(result: Result) -> dict[str, Any]:
    """What a log line says of an answer."""
    return {
        "tokens": result.tokens,
        "queue_ms": round(1000 * result.queued, 3),
        "model_ms": round(1000 * result.model, 3),
        "truncated": result.truncated,
        **({"cache": result.cache} if result.cache else {}),
    }
