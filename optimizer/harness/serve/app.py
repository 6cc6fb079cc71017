"""The ASGI application: which path answers what, and a log line for each request."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from . import openai, openai_texts
from .asgi import (
    Disconnected,
    Receive,
    Response,
    Scope,
    Send,
    Stream,
    document,
    headers_of,
    read_body,
    while_connected,
    whole_header,
)
from .engine import Result
from .inference import Service
from .metrics import CONTENT_TYPE
from .refusals import (
    DeadlineError,
    DrainingError,
    MethodError,
    ModelError,
    OverloadError,
    RequestError,
    TokenError,
    UnknownError,
)
from .tensors import Request, read, read_object, written

LENGTH = "inference-header-content-length"
ID = "x-request-id"
SAFE_ID = re.compile(r"[\w.:-]{1,128}", re.A)
OPEN = ("live", "ready", "healthz", "readyz")  # paths that need no token: a cluster asks them
REASONS = {OverloadError: "REJECTED", DrainingError: "REJECTED", DeadlineError: "REJECTED"}


@dataclass(frozen=True)
class Security:
    """token: what a client's `Authorization: Bearer` must hold; "" for no such check. largest:
    bytes of a body. body_seconds: in which it must have come."""

    token: str = ""
    largest: int = 16 << 20
    body_seconds: float = 10.0


@dataclass
class _Exchange:
    """One request while it is answered. route: what it asks for, as a log and its errors need it;
    never the path itself, which is the client's."""

    method: str
    parts: list[str]
    headers: dict[str, str]
    client: str
    receive: Receive
    id: str
    route: str = "unknown"
    log: dict[str, Any] = field(default_factory=dict)
    streamed: Result | None = None  # complete once the stream has ended


class App:
    """Answers over HTTP. service: None until the model is ready. say: takes a log line's fields."""

    def __init__(self, security: Security, say: Callable[..., None]) -> None:
        self.service: Service | None = None
        self._security, self._say = security, say
        self._created = int(time.time())
        self.active = 0  # requests that are being answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers, start = headers_of(scope), time.perf_counter()
        given_id = headers.get(ID, "")
        exchange = _Exchange(
            scope["method"],
            [p for p in scope["path"].split("/") if p],
            headers,
            (scope.get("client") or ("",))[0],
            receive,
            given_id if SAFE_ID.fullmatch(given_id) else secrets.token_hex(8),
        )
        self.active += 1
        try:
            response = await self._answer(exchange)
        except Disconnected:
            self._log(exchange, 499, start)
            return
        finally:
            self.active -= 1
        response.headers[ID] = exchange.id
        if isinstance(response, Stream):
            await self._stream(exchange, response, send, start)
            return
        self._log(exchange, response.status, start)
        await response.send(send)

    async def _stream(
        self, exchange: _Exchange, response: Stream, send: Send, start: float
    ) -> None:
        self.active += 1
        try:
            await response.send(send)
        except Disconnected:
            self.count_failure(None)
            response.status = 499
        finally:
            self.active -= 1
            if exchange.streamed is not None:
                exchange.log = _counts(exchange.streamed)
            self._log(exchange, response.status, start)

    async def _answer(self, exchange: _Exchange) -> Response | Stream:
        """The response, also to what is refused."""
        try:
            return await self._routed(exchange)
        except RequestError as e:
            self.count_failure(e)
            return _error(exchange.route, e)
        except Disconnected:
            self.count_failure(None)
            raise
        except Exception as e:  # our bug: the client learns that, the log which
            self.bug(e, exchange.id)
            self.count_failure(ModelError(""))
            return _error(exchange.route, ModelError("unexpected failure"))

    async def _routed(self, exchange: _Exchange) -> Response | Stream:
        match exchange.parts:
            case ["healthz"] | ["v2", "health", "live"]:
                self._accept(exchange, "live", "GET")
                return document({"live": True})
            case ["readyz"] | ["v2", "health", "ready"]:
                self._accept(exchange, "ready", "GET")
                return document({"ready": self.ready}, 200 if self.ready else 503)
            case ["metrics"]:
                self._accept(exchange, "metrics", "GET")
                text = self.ready_service().engine.metrics.text()
                return Response(text.encode(), content_type=CONTENT_TYPE)
            case ["v1", *rest]:
                return await self._openai(exchange, rest)
            case ["v2"]:
                self._accept(exchange, "v2 server", "GET")
                return document(self.ready_service().server())
            case ["v2", "models", name, "versions", version, *rest]:
                return await self._v2(exchange, name, version, rest)
            case ["v2", "models", name, *rest]:
                return await self._v2(exchange, name, "", rest)
        raise UnknownError("no such path")

    @property
    def ready(self) -> bool:
        """Whether a request would be answered: loaded, warmed up, not ending."""
        return self.service is not None and not self.service.engine.draining

    def _accept(self, exchange: _Exchange, route: str, method: str) -> None:
        """Raises MethodError, and TokenError where one is needed."""
        exchange.route = route
        if exchange.method != method and not (method == "GET" and exchange.method == "HEAD"):
            raise MethodError(method)
        token = self._security.token
        if not token or route in OPEN:
            return
        scheme, _, value = exchange.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(value.strip().encode("utf-8"), token.encode("utf-8"))
        if scheme.lower() != "bearer" or not right:
            raise TokenError("a bearer token is needed")

    def ready_service(self) -> Service:
        """Raises DrainingError while there is no model yet."""
        if self.service is None:
            raise DrainingError("the model is not ready yet", retry_after=1.0)
        return self.service

    async def _v2(self, exchange: _Exchange, name: str, version: str, rest: list[str]) -> Response:
        if rest == ["ready"]:
            self._accept(exchange, "ready", "GET")
            self.ready_service().check(name, version)
            return document({"name": name, "ready": self.ready}, 200 if self.ready else 503)
        if not rest:
            self._accept(exchange, "v2 metadata", "GET")
            return document(self.ready_service().metadata(name, version))
        if rest != ["infer"]:
            raise UnknownError("no such path")
        self._accept(exchange, "v2 infer", "POST")
        service, headers = self.ready_service(), exchange.headers
        service.check(name, version)
        body = await self._body(exchange)
        service.engine.check(exchange.client)
        request = read(body, whole_header(headers, LENGTH))
        call = service.call(exchange.client, request.parameters, _timeout(exchange))

        async def work() -> Response:
            outputs, result = await service.infer(name, version, request, call)
            return self._infer_response(exchange, service, request, (name, outputs, result))

        return await while_connected(work(), exchange.receive)

    def _infer_response(
        self,
        exchange: _Exchange,
        service: Service,
        request: Request,
        answered: tuple[str, list[tuple[str, Any]], Result],
    ) -> Response:
        name, outputs, result = answered
        start = time.perf_counter()
        head = {"model_name": name, "model_version": service.engine.model.version}
        head |= {"id": request.id} if request.id else {}
        binary = {o.name: o.binary for o in request.outputs or ()}
        body, length = written(
            head, [(n, array, binary.get(n, request.binary)) for n, array in outputs]
        )
        service.engine.metrics.postprocess.observe(time.perf_counter() - start)
        response = Response(body)
        if length is not None:
            response.content_type = "application/octet-stream"
            response.headers["inference-header-content-length"] = str(length)
        return self._finish(exchange, response, result)

    async def _openai(self, exchange: _Exchange, rest: list[str]) -> Response | Stream:
        if rest == ["models"]:
            self._accept(exchange, "v1 models", "GET")
            return document(openai.models(self.ready_service(), self._created))
        if rest not in (["embeddings"], ["completions"], ["chat", "completions"]):
            exchange.route = "v1"
            raise UnknownError(
                "no such path; here are /v1/models, /v1/embeddings, /v1/completions and "
                "/v1/chat/completions"
            )
        self._accept(exchange, f"v1 {' '.join(rest)}", "POST")
        service = self.ready_service()
        data = await self._body(exchange)
        service.engine.check(exchange.client)
        body = read_object(data)
        seconds = _timeout(exchange)
        if rest != ["embeddings"]:
            call = service.call(exchange.client, {}, seconds)
            asking = openai_texts.Asking(call, exchange.receive, self._security.body_seconds)
            chat = rest[0] == "chat"
            response, result = await openai_texts.answer(service, body, asking, chat=chat)
            if isinstance(response, Stream):
                exchange.streamed = result
                service.engine.metrics.success.add()
                return response
            return self._finish(exchange, response, result)

        async def work() -> Response:
            answer, result = await openai.embeddings(service, body, exchange.client, seconds)
            return self._finish(exchange, document(answer), result)

        return await while_connected(work(), exchange.receive)

    async def _body(self, exchange: _Exchange) -> bytes:
        security = self._security
        return await read_body(
            exchange.headers, exchange.receive, security.largest, security.body_seconds
        )

    def _finish(self, exchange: _Exchange, response: Response, result: Result) -> Response:
        """Count an answer, and say of it what is no text."""
        if result.truncated:  # the model read the beginning of so many texts
            response.headers["x-truncated-texts"] = str(result.truncated)
        exchange.log = _counts(result)
        self.ready_service().engine.metrics.success.add()
        return response

    @contextmanager
    def call(self, route: str) -> Iterator[dict[str, Any]]:
        """A call that does not come over HTTP, counted as active and logged with the fields that
        are put into what this yields."""
        start, log = time.perf_counter(), dict[str, Any](status="OK")
        self.active += 1
        try:
            yield log
        except asyncio.CancelledError:
            self.count_failure(None)
            log["status"] = "CANCELLED"
            raise
        finally:
            self.active -= 1
            ms = round(1000 * (time.perf_counter() - start), 3)
            request_id = secrets.token_hex(8)
            self._say(
                level="info", event="request", request_id=request_id, route=route, **log, ms=ms
            )

    def bug(self, error: Exception, request_id: str = "") -> None:
        """Log what should not happen."""
        self._say(level="error", event="bug", request_id=request_id, error=repr(error)[:500])

    def count_failure(self, error: RequestError | None) -> None:
        """Count a request that was not answered; None: whose client left."""
        if self.service is None:
            return
        reason = "CANCELED" if error is None else REASONS.get(type(error), "OTHER")
        reason = "BACKEND" if isinstance(error, ModelError) else reason
        self.service.engine.metrics.failure.add(reason=reason)

    def _log(self, exchange: _Exchange, status: int, start: float) -> None:
        seconds = time.perf_counter() - start
        if self.service is not None and exchange.log:
            self.service.engine.metrics.request.observe(seconds)
        self._say(
            level="info",
            event="request",
            request_id=exchange.id,
            route=exchange.route,
            status=status,
            ms=round(1000 * seconds, 3),
            **exchange.log,
        )


def _counts(result: Result) -> dict[str, Any]:
    return {
        "tokens": result.tokens,
        "queue_ms": round(1000 * result.queued, 3),
        "model_ms": round(1000 * result.model, 3),
        "truncated": result.truncated,
    }


def _timeout(exchange: _Exchange) -> float | None:
    """The header X-Request-Timeout, in seconds. Raises RequestError."""
    value = exchange.headers.get("x-request-timeout")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise RequestError("header x-request-timeout is not a number of seconds")
    return seconds


def _error(route: str, error: RequestError) -> Response:
    body = openai.error(error) if route.startswith("v1") else {"error": error.message}
    status = error.http
    if isinstance(error, OverloadError) and route.startswith("v1"):
        status = 429  # what OpenAI's clients wait and ask again for
    response = document(body, status)
    if isinstance(error, MethodError):
        response.headers["allow"] = error.accepted
    if isinstance(error, TokenError):
        response.headers["www-authenticate"] = "Bearer"
    if error.retry_after is not None:
        response.headers["retry-after"] = str(max(1, ceil(error.retry_after)))
    return response
