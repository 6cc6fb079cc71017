"""The ASGI application: which path answers what, and a log line for each request."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import ceil

from ..beside import Beside
from ..inference import Service
from ..observe.metrics import CONTENT_TYPE
from ..observe.trace_context import HEADER, trace_fields
from ..observe.tracing import Request, Tracer
from ..refusals import (
    DeadlineError,
    DrainingError,
    HostError,
    MethodError,
    ModelError,
    OverloadError,
    RequestError,
    SlowClientError,
    TokenError,
    UnknownError,
)
from ..tensors import read_object
from ..versions.versions import Versions
from . import openai, openai_texts, v2_http
from .asgi import (
    PLACE,
    Disconnected,
    Message,
    Receive,
    Response,
    Scope,
    Send,
    Stream,
    cache_control,
    document,
    headers_of,
    while_connected,
)
from .exchange import OPEN, Bodies, Exchange, Record, Security
from .v2_http import Load

ID = "x-request-id"
SAFE_ID = re.compile(r"[\w.:-]{1,128}", re.A)
HELD = 8  # of the largest bodies, that are held at once; packed ones count as what they become
COUNTS = ("tokens", "truncated")  # of the log, that a span has too
V2 = "v2 infer"
TEXTS = {f"/v1/{p}": f"v1 {p.replace('/', ' ')}" for p in openai.PATHS}  # what is logged of them
REASONS = {OverloadError: "REJECTED", DrainingError: "REJECTED", DeadlineError: "REJECTED"}

__all__ = ["OPEN", "PLACE", "App", "Security"]


class App:
    """Answers over HTTP. versions: what is served; empty until the first is ready. say: takes a log
    line's fields. tracer: of requests, see server/observe/tracing.py. load: opens the bundle of a
    model again."""

    def __init__(
        self, security: Security, say: Callable[..., None], tracer: Tracer | None = None
    ) -> None:
        self.versions = Versions()
        self.load: Load | None = None
        self.security, self._say, self._tracer = security, say, tracer
        self._created = int(time.time())
        self._beside: Beside | None = None
        self.bodies = Bodies(HELD * security.largest)
        self.active = 0  # requests that are being answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        start, exchange = time.monotonic(), self._exchange(scope, receive)
        exchange.put(scope.get(PLACE))
        self.active += 1
        try:
            response = await self._answer(exchange, scope)
        except Disconnected:
            self._log(exchange, 499, start)
            return
        finally:
            exchange.leases.close()
            self.active -= 1
        response.headers[ID] = exchange.id
        if isinstance(response, Stream):
            await self._stream(exchange, response, send, start)
            return
        end, status = time.monotonic(), response.status
        try:
            await response.send(send, self.security.body_seconds)
        except Disconnected:  # the client does not read it; the server closes the connection
            status = 499
        finally:  # after what somebody waits for
            self._log(exchange, status, start, end)

    @property
    def beside(self) -> Beside:
        """Threads in which bodies are parsed."""
        if self._beside is None:  # an application may be made before there is an event loop
            self._beside = Beside()
        return self._beside

    def refused(self, scope: Scope, size: int) -> Response | None:
        """What refuses a request that would be refused whatever it holds, counted and logged; None
        for all others, which `__call__` is to answer next, and for all that it is not sure of; of
        the first, the scope has the place. For a server that asks when a request has come and
        before it makes a task of it, which costs more than to refuse it. size: of the whole body,
        in bytes."""
        start, service = time.monotonic(), self.versions.sole
        route = _reading(scope["path"], service) if service is not None else ""
        if service is None or not route or size > self.security.largest:
            return None
        try:
            scope[PLACE] = service.admit(_client(scope))
        except RequestError as e:
            error = e
        else:
            return None
        exchange = self._exchange(scope, _nothing)
        if "content-encoding" in exchange.headers:  # what is packed wrongly is told that
            return None
        try:
            exchange.accept(route, "POST")
        except RequestError:
            return None
        exchange.service = service if route == V2 else None  # as where its body is read first
        self.count_failure(error, exchange.service)
        response = _error(route, error)
        response.headers[ID] = exchange.id
        self._log(exchange, response.status, start)
        return response

    def _exchange(self, scope: Scope, receive: Receive) -> Exchange:
        headers = headers_of(scope)
        given_id = headers.get(ID, "")
        return Exchange(
            scope["method"],
            [p for p in scope["path"].split("/") if p],
            _client(scope),
            receive,
            self.security,
            self.beside,
            self.bodies,
            headers=headers,
            id=given_id if SAFE_ID.fullmatch(given_id) else secrets.token_hex(8),
        )

    async def _stream(self, exchange: Exchange, response: Stream, send: Send, start: float) -> None:
        self.active += 1
        try:
            await response.send(send)
        except Disconnected:
            self.count_failure(None, exchange.service)
            response.status = 499
        finally:
            self.active -= 1
            if exchange.streamed is not None:
                exchange.answered(exchange.streamed)
            self._log(exchange, response.status, start)

    async def _answer(self, exchange: Exchange, scope: Scope) -> Response | Stream:
        """The response, also to what is refused."""
        try:
            self._check_host(exchange, scope)
            return await self._routed(exchange)
        except RequestError as e:
            self.count_failure(e, exchange.service)
            return _error(exchange.route, e)
        except Disconnected:
            self.count_failure(None, exchange.service)
            raise
        except Exception as e:  # our bug: the client learns that, the log which
            self.bug(e, exchange.id)
            self.count_failure(ModelError(""), exchange.service)
            return _error(exchange.route, ModelError("unexpected failure"))

    def _check_host(self, exchange: Exchange, scope: Scope) -> None:
        """Raises HostError for a request that names another host than this server."""
        hosts, address = self.security.hosts, str((scope.get("server") or ("",))[0])
        if hosts is not None and not hosts.accept(exchange.headers.get("host", ""), address):
            raise HostError(
                "the Host header names another server; to accept it, start with --allowed-host NAME"
            )

    async def _routed(self, exchange: Exchange) -> Response | Stream:
        versions = self.versions
        match exchange.parts:
            case ["healthz"] | ["v2", "health", "live"]:
                exchange.accept("live", "GET")
                return document({"live": True})
            case ["readyz"] | ["v2", "health", "ready"]:
                exchange.accept("ready", "GET")
                return document({"ready": versions.ready}, 200 if versions.ready else 503)
            case ["metrics"]:
                exchange.accept("metrics", "GET")
                self.first()
                return Response(versions.metrics().encode(), content_type=CONTENT_TYPE)
            case ["v1", *rest]:
                return await self._openai(exchange, rest)
            case ["v2"]:
                exchange.accept("v2 server", "GET")
                return document(self.first().server())
            case ["v2", "repository", *rest]:
                return await v2_http.repository(exchange, versions, self.load, rest)
            case ["v2", "models", name, "versions", version, *rest]:
                return await v2_http.model(exchange, versions, name, version, rest)
            case ["v2", "models", name, *rest]:
                return await v2_http.model(exchange, versions, name, "", rest)
        raise UnknownError("no such path")

    def first(self) -> Service:
        """The first model's. Raises DrainingError while there is no model yet."""
        if not self.versions.current:
            raise DrainingError("the model is not ready yet", retry_after=1.0)
        return self.versions.current[0].service

    async def _openai(self, exchange: Exchange, rest: list[str]) -> Response | Stream:
        if rest == ["models"]:
            exchange.accept("v1 models", "GET")
            self.first()
            names = [s.name for s in self.versions.current]
            return document(openai.models(names, self._created))
        if rest not in (["embeddings"], ["completions"], ["chat", "completions"]):
            exchange.route = "v1"
            raise UnknownError(
                "no such path; here are /v1/models, /v1/embeddings, /v1/completions and "
                "/v1/chat/completions"
            )
        exchange.accept(f"v1 {' '.join(rest)}", "POST")
        self.first()
        data = await exchange.body()
        only = len(self.versions.current) == 1  # of several, what is read below says which
        if only:
            exchange.admit(self.first())
        body = await exchange.parsed(data, partial(read_object, values=self.security.values))
        named = openai.named(self.versions.current, body.get("model"))
        version = exchange.headers.get("x-model-version", "")
        service = exchange.lease(self.versions.route(named.name, version))
        if not only:
            exchange.admit(service)
        call = exchange.call(service, {})
        if rest != ["embeddings"]:
            seconds_of_a_part = self.security.body_seconds
            control = cache_control(exchange.headers)
            asking = openai_texts.Asking(call, exchange.receive, seconds_of_a_part, control)
            chat = rest[0] == "chat"
            response, result = await openai_texts.answer(service, body, asking, chat=chat)
            if isinstance(response, Stream):
                exchange.streamed = result
                service.engine.metrics.success.add()
                return response
            return exchange.finished(response, result)

        async def work() -> Response:
            answer, result = await openai.embeddings(service, body, call)
            return exchange.finished(answer, result)

        return await while_connected(work(), exchange.receive)

    @contextmanager
    def call(self, route: str, metadata: Mapping[str, str]) -> Iterator[Record]:
        """A request over gRPC, counted as active, and logged and traced when it ends. Raises
        RequestError for whatever it ends with, except that it was cancelled."""
        start, status = time.monotonic(), "OK"
        record = Record(id=secrets.token_hex(8), headers=metadata, route=route)
        self.active += 1
        try:
            yield record
        except asyncio.CancelledError:
            status = "CANCELLED"
            self.count_failure(None, record.service)
            raise
        except Exception as e:
            if not isinstance(e, RequestError):  # our bug: the client learns that, the log which
                self.bug(e, record.id)
            error = e if isinstance(e, RequestError) else ModelError("unexpected failure")
            status = error.grpc
            self.count_failure(error, record.service)
            raise error from None
        finally:
            self.active -= 1
            self._log(record, status, start)

    def bug(self, error: Exception, request_id: str = "") -> None:
        """Log what should not happen."""
        self._say(level="error", event="bug", request_id=request_id, error=repr(error)[:500])

    def count_failure(self, error: RequestError | None, service: Service | None) -> None:
        """Count a request that was not answered. error: None for one whose client left. service:
        whose it was; None for none yet, which the first model counts."""
        if service is None:
            if not self.versions.current:
                return
            service = self.first()
        reason = "CANCELED" if error is None else REASONS.get(type(error), "OTHER")
        reason = "BACKEND" if isinstance(error, ModelError) else reason
        service.engine.metrics.failure.add(reason=reason)

    def _log(
        self, record: Record, status: int | str, start: float, end: float | None = None
    ) -> None:
        """status: HTTP's, or the name of gRPC's code. end: None for now."""
        end = time.monotonic() if end is None else end
        seconds = end - start
        if record.service is not None and record.log:
            record.service.engine.metrics.request.observe(seconds)
        self._say(
            level="info",
            event="request",
            request_id=record.id,
            route=record.route,
            status=status,
            ms=round(1000 * seconds, 3),
            **trace_fields(record.headers.get(HEADER)),
            **record.log,
        )
        if self._tracer is not None:
            attributes: dict[str, str | int] = {"request_id": record.id}
            if record.service is not None:
                names = record.service.name, record.service.version
                attributes |= dict(zip(("model", "version"), names, strict=True))
            attributes |= {n: record.log[n] for n in COUNTS if n in record.log}
            self._tracer.add(
                Request(
                    *(record.route, status, start, end, record.headers, record.times),
                    attributes,
                )
            )


def _client(scope: Scope) -> str:
    """Its address."""
    return str((scope.get("client") or ("",))[0])


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _reading(path: str, service: Service) -> str:
    """The route of a path whose requests this model reads and answers; "" for others."""
    if path in TEXTS:
        return TEXTS[path]
    if not path.startswith("/v2/models/") or not path.endswith("/infer"):
        return ""
    inner = path.removeprefix("/v2/models/").removesuffix("/infer")
    name, _, version = inner.partition("/versions/")
    same = version == service.version if "/" in inner else True
    return V2 if same and name in service.names else ""


def _error(route: str, error: RequestError) -> Response:
    body = openai.error(error) if route.startswith("v1") else {"error": error.message}
    status = error.http
    if isinstance(error, OverloadError) and route.startswith("v1"):
        status = 429  # what OpenAI's clients wait and ask again for
    response = document(body, status)
    if isinstance(error, MethodError):
        response.headers["allow"] = error.accepted
    if isinstance(error, SlowClientError):  # the rest of its body is not waited for
        response.headers["connection"] = "close"
    if isinstance(error, TokenError):
        response.headers["www-authenticate"] = "Bearer"
    if error.retry_after is not None:
        response.headers["retry-after"] = str(max(1, ceil(error.retry_after)))
    return response
