"""The ASGI application of a server: its paths, and a log line, metrics and a span per request."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import ceil

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Received
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from ..inference import SERVER, Service
from ..observe.metrics import CONTENT_TYPE, Counter
from ..observe.trace_context import HEADER, trace_fields
from ..observe.tracing import Tracer
from ..refusals import (
    DeadlineError,
    DrainingError,
    FramingError,
    HostError,
    MethodError,
    ModelError,
    OverloadError,
    RequestError,
    TokenError,
    UnknownError,
)
from ..request import Request
from ..versions.versions import Versions
from ..worker_threads import WorkerThreads
from . import openai, openai_texts, openapi, v2_http
from .request import Bodies, Document, EventStream, HttpRequest, Security
from .retrieval import embed, embed_sparse, rerank
from .v2_http import Load

ID = "x-request-id"
SAFE_ID = re.compile(r"[\w.:-]{1,128}", re.A)
HELD = 8  # bodies of the largest size that are held at once; a packed one counts as unpacked
REJECTED = (OverloadError, DrainingError, DeadlineError)
Handler = Callable[..., Awaitable[Response]]


class App:
    """ASGI application that answers over HTTP, and counts and logs requests over gRPC too.

    versions: served models; empty until the first model is ready
    load: function that reloads the model of a name; None until the first models are loaded
    security: limits of every request
    say: function that writes its arguments as one log line
    tracer: tracer of the requests' spans (observe/tracing.py); None: no spans
    active: requests that are being answered
    """

    def __init__(
        self, security: Security, say: Callable[..., None], tracer: Tracer | None = None
    ) -> None:
        self.versions = Versions()
        self.load: Load | None = None
        self.security, self._say, self._tracer = security, say, tracer
        self._created = int(time.time())
        self._worker_threads: WorkerThreads | None = None
        self.bodies = Bodies(HELD * security.largest)
        self.active = 0
        self._requests = Counter("optimize_requests_total", "Ended requests by route and status")
        self._routes = [Route(path, handler) for path, handler in self._paths().items()]

    def _paths(self) -> dict[str, Handler]:
        model, named = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        index, load = "/v2/repository/index", "/v2/repository/models/{name}/load"
        return {
            "/": self._root,
            "/docs": self._docs,
            "/openapi.json": self._openapi,
            **dict.fromkeys(("/healthz", "/v2/health/live"), self._live),
            **dict.fromkeys(("/readyz", "/v2/health/ready"), self._ready),
            "/metrics": self._metrics,
            "/v1/models": self._models,
            **{f"/v1/{p}": partial(self._openai, p) for p in openai.PATHS},
            **{path: partial(self._rerank, version) for path, version in rerank.PATHS.items()},
            embed.PATH: self._embed,
            embed_sparse.PATH: self._embed_sparse,
            "/v1/{rest:path}": self._unknown_v1,
            "/v2": self._server,
            "/v2/models/stats": partial(v2_http.statistics, self.versions),
            index: partial(v2_http.index, self.versions),
            load: partial(v2_http.load, self),
            **dict.fromkeys((model, named), partial(v2_http.metadata, self.versions)),
            **{f"{m}/config": partial(v2_http.config, self.versions) for m in (model, named)},
            **{f"{m}/stats": partial(v2_http.statistics, self.versions) for m in (model, named)},
            **{f"{m}/ready": partial(v2_http.ready, self.versions) for m in (model, named)},
            **{f"{m}/infer": partial(v2_http.infer, self.versions) for m in (model, named)},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = self._request(scope, receive)
        self.active += 1
        try:
            with request.leases:
                response = await self._answer(request, scope)
            response.headers[ID] = request.id
            request.status = response.status_code
            if not isinstance(response, EventStream):
                request.end = time.monotonic()
            await response(scope, receive, send)
            if isinstance(response, EventStream) and not response.complete:
                raise ClientDisconnect
        except ClientDisconnect:
            self.count_failure(None, request)
            request.status = 499
        finally:
            self.active -= 1
            self._log(request)  # after the answer that the client waits for

    @property
    def worker_threads(self) -> WorkerThreads:
        """Return the threads in which the server parses large bodies."""
        if self._worker_threads is None:  # an application may be made before there is an event loop
            self._worker_threads = WorkerThreads()
        return self._worker_threads

    def _request(self, scope: Scope, receive: Receive) -> HttpRequest:
        headers = Headers(scope=scope)
        request = HttpRequest(
            headers=headers,
            client=str((scope.get("client") or ("",))[0]),
            received=Received(scope, receive),
            security=self.security,
            worker_threads=self.worker_threads,
            bodies=self.bodies,
        )
        if SAFE_ID.fullmatch(headers.get(ID, "")):
            request.id = headers[ID]
        return request

    async def _answer(self, request: HttpRequest, scope: Scope) -> Response:
        """Return the HTTP response to a request, or the error response of a refused one.

        Raises ClientDisconnect.
        """
        try:
            self._check(request, scope)
            for route in self._routes:
                match, child = route.matches(scope)
                if match is not Match.NONE:
                    response: Response = await route.endpoint(request, **child["path_params"])
                    return response
            raise UnknownError("no such path; GET / lists them")
        except RequestError as e:
            self.count_failure(e, request)
            return _error(request.route, e)
        except ClientDisconnect:
            raise
        except Exception as e:  # our bug: the log says which, the client only that there is one
            self.log_bug(e, request.id)
            self.count_failure(ModelError(""), request)
            return _error(request.route, ModelError("unexpected failure"))

    def _check(self, request: HttpRequest, scope: Scope) -> None:
        """Check the host and the framing of an HTTP request.

        Raises HostError if it names another host than this server, FramingError if the length of
        the body is given twice.
        """
        hosts, address = self.security.hosts, str((scope.get("server") or ("",))[0])
        if hosts is not None and not hosts.accept(request.headers.get("host", ""), address):
            raise HostError(
                "the Host header names another server; to accept it, start with --allowed-host NAME"
            )
        if "transfer-encoding" in request.headers and "content-length" in request.headers:
            raise FramingError("content-length and transfer-encoding are both given")

    async def _root(self, request: HttpRequest) -> Response:
        request.accept("root", "GET")
        models = [n for s in self.versions.current for n in s.service.names]
        state = {"server": SERVER, "ready": self.versions.ready, "models": models}
        return Document({**state, "docs": "/docs", "paths": openapi.list_paths()})

    async def _docs(self, request: HttpRequest) -> Response:
        request.accept("docs", "GET")
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        return HTMLResponse(openapi.render_page(), headers={"content-security-policy": policy})

    async def _openapi(self, request: HttpRequest) -> Response:
        request.accept("docs", "GET")
        return Document(openapi.build_document())

    async def _live(self, request: HttpRequest) -> Response:
        request.accept("live", "GET")
        return Document({"live": True})

    async def _ready(self, request: HttpRequest) -> Response:
        request.accept("ready", "GET")
        ready = self.versions.ready
        return Document({"ready": ready}, 200 if ready else 503)

    async def _metrics(self, request: HttpRequest) -> Response:
        request.accept("metrics", "GET")
        self.first_service()
        return Response(self.versions.metrics(self._requests), media_type=CONTENT_TYPE)

    async def _server(self, request: HttpRequest) -> Response:
        request.accept("v2 server", "GET")
        return Document(self.first_service().server())

    async def _models(self, request: HttpRequest) -> Response:
        request.accept("v1 models", "GET")
        self.first_service()
        names = [name for s in self.versions.current for name in s.service.openai_names]
        return Document(openai.models(names, self._created))

    async def _unknown_v1(self, request: HttpRequest, rest: str) -> Response:  # noqa: ARG002
        request.route = "v1"
        paths = ", ".join(f"/v1/{p}" for p in ("models", "rerank", *openai.PATHS))
        raise UnknownError(f"no such path; here are {paths}")

    async def _openai(self, path: str, request: HttpRequest) -> Response:
        request.accept(f"v1 {path.replace('/', ' ')}", "POST")
        service, body = await openai.read(request, self.first_service(), self.versions)
        if path == "embeddings":
            return await request.while_connected(openai.embeddings(service, body, request))
        return await openai_texts.answer(service, body, request, chat=path.startswith("chat"))

    async def _rerank(self, version: str, request: HttpRequest) -> Response:
        request.accept(f"{version} rerank".lstrip(), "POST")
        service, body = await openai.read(
            request, self.first_service(), self.versions, unnamed=True
        )
        return await request.while_connected(rerank.answer(service, body, request, version))

    async def _embed(self, request: HttpRequest) -> Response:
        request.accept("v2 embed", "POST")
        service, body = await openai.read(
            request, self.first_service(), self.versions, unnamed=True
        )
        return await request.while_connected(embed.answer(service, body, request))

    async def _embed_sparse(self, request: HttpRequest) -> Response:
        request.accept("embed_sparse", "POST")
        service, body = await openai.read(
            request, self.first_service(), self.versions, unnamed=True
        )
        return await request.while_connected(embed_sparse.answer(service, body, request))

    def first_service(self) -> Service:
        """Return the service of the first model. Raises DrainingError until a model is ready."""
        if not self.versions.current:
            raise DrainingError("the model is not ready yet", retry_after=1.0)
        return self.versions.current[0].service

    @contextmanager
    def call(self, route: str, metadata: Mapping[str, str], client: str) -> Iterator[Request]:
        """Yield the Request of a gRPC call, which is counted as active, logged and traced.

        route: name of the method
        metadata: metadata of the call
        client: address of the client

        Raises RequestError for every exception but a cancellation.
        """
        request = Request(headers=metadata, client=client, route=route, status="OK")
        self.active += 1
        try:
            yield request
        except asyncio.CancelledError:
            request.status = "CANCELLED"
            self.count_failure(None, request)
            raise
        except Exception as e:
            if not isinstance(e, RequestError):  # our bug, as in `_answer`
                self.log_bug(e, request.id)
            error = e if isinstance(e, RequestError) else ModelError("unexpected failure")
            request.status = error.grpc
            self.count_failure(error, request)
            raise error from None
        finally:
            self.active -= 1
            self._log(request)

    def log_bug(self, error: Exception, request_id: str = "") -> None:
        """Log in the server an exception that a request met and that the server does not expect."""
        self._say(level="error", event="bug", request_id=request_id, error=repr(error)[:500])

    def count_failure(self, error: RequestError | None, request: Request) -> None:
        """Count a request that was not answered in the metrics of its model.

        A request of no model, such as one to an unknown path, counts in optimize_requests_total
        only.

        error: error that ended the request; None if the client left
        """
        if request.metrics is None:
            return
        if error is None:
            reason = "CANCELED"
        elif isinstance(error, ModelError):
            reason = "BACKEND"
        else:
            reason = "REJECTED" if type(error) in REJECTED else "OTHER"
        request.metrics.failure.add(reason=reason)
        seconds = time.monotonic() - request.start
        request.metrics.statistics[request.model].count_failed(seconds)

    def _log(self, request: Request) -> None:
        request.end = request.end or time.monotonic()
        seconds = request.end - request.start
        request.count()
        self._requests.add(route=request.route, status=str(request.status))
        self._say(
            level="info",
            event="request",
            request_id=request.id,
            route=request.route,
            status=request.status,
            ms=round(1000 * seconds, 3),
            **({"model": request.model, "version": request.version} if request.model else {}),
            **trace_fields(request.headers.get(HEADER)),
            **request.counts,
        )
        if self._tracer is not None:
            self._tracer.add(request)


# last segment of routes that copy other services' APIs
CLIENTS = ("rerank", "embed", "embed_sparse")


def _error(route: str, error: RequestError) -> Response:
    body = openai.build_error(error) if route.startswith("v1") else {"error": error.message}
    status = error.http
    if isinstance(error, OverloadError) and (route.startswith("v1") or route.endswith(CLIENTS)):
        status = 429  # the status at which the clients of these services retry
    response = Document(body, status)
    if isinstance(error, MethodError):
        response.headers["allow"] = error.accepted
    if error.closes:
        response.headers["connection"] = "close"
    if isinstance(error, TokenError):
        response.headers["www-authenticate"] = "Bearer"
    if error.retry_after is not None:
        response.headers["retry-after"] = str(max(1, ceil(error.retry_after)))
    return response
