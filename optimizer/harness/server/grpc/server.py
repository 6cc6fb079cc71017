"""Serve the Open Inference Protocol v2 over gRPC, on the event loop and engines of HTTP."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from ...errors import MachineError
from ..http.app import App
from ..inference import Service
from ..model_config import number_enumerations
from ..refusals import OverloadError, RequestError, SlowClientError, TokenError
from ..request import Request
from .messages import METHODS, PACKAGE, SERVICE, STREAM, methods
from .stream import GrpcStream
from .tensors import build_response, client_of_call, parse, read_request

PACKAGES = {"grpc": "grpcio", "google.protobuf": "protobuf"}
Answer = Callable[[Any, Any, Request], Awaitable[Any]]


class GrpcServer:
    """gRPC server for the models of an application, which counts and logs the requests."""

    def __init__(self, app: App, calls: int | None = None, of_client: int | None = None) -> None:
        """
        calls: maximum calls at once; None for no limit
        of_client: maximum calls at once of one client address; None for no limit
        """
        import grpc

        self._app, self._methods = app, methods()
        self._token, self._seconds = app.security.token, app.security.body_seconds
        self._of_client, self._calls = of_client, Counter[str]()
        self._codes = {code.name: code for code in grpc.StatusCode}
        options = [
            ("grpc.max_receive_message_length", app.security.largest),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=calls)
        self._ending = asyncio.Event()
        answers: dict[str, Answer] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "ModelInfer": self._infer,
        }
        handlers = {
            # a stream of one request, so that its arrival has a time limit: gRPC has none
            name: grpc.stream_unary_rpc_method_handler(
                self._guard(name, answers[name]),
                request_deserializer=None,  # see tensors.parse
                response_serializer=self._methods[name].response.SerializeToString,
            )
            for name in METHODS
        }
        handlers[STREAM] = grpc.stream_stream_rpc_method_handler(
            self._stream,
            request_deserializer=None,
            response_serializer=self._methods[STREAM].response.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(f"{PACKAGE}.{SERVICE}", handlers)
        self._server.add_generic_rpc_handlers((handler,))

    async def start(self, host: str, port: int) -> int:
        """Listen on an address for gRPC calls; return the port. Port 0 takes a free one.

        Raises MachineError for a port that is taken or forbidden.
        """
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            bound = 0
        if not bound:
            raise MachineError("cannot listen", where=f"{host}:{port}", fix="Try --grpc-port 0.")
        await self._server.start()
        return int(bound)

    async def close(self, seconds: float) -> None:
        """Accept no more gRPC calls, and cancel calls that still run after `seconds`.

        A stream ends with the answers to the requests that it has received.
        """
        self._ending.set()
        await self._server.stop(seconds)

    def _guard(self, name: str, answer: Answer) -> Callable[[Any, Any], Awaitable[Any]]:
        """Wrap a gRPC method so that its calls are counted, logged and traced, and errors become
        gRPC statuses.

        name: name of the method
        answer: function that answers its request
        """

        async def guarded(requests: Any, context: Any) -> Any:
            metadata = _metadata(context)
            try:
                with (
                    self._app.call(f"grpc {name}", metadata, client_of_call(context)) as request,
                    self._place(client_of_call(context)),
                ):
                    if name not in ("ServerLive", "ServerReady", "ModelReady"):
                        self._check_token(metadata)
                    data = await self._only(requests)
                    with self._app.bodies.room(len(data)):
                        kind = self._methods[name].request
                        message = await parse(self._app, kind, data, request.client)
                        return await answer(message, context, request)
            except RequestError as e:
                await self._abort(context, e)

        return guarded

    async def _only(self, requests: AsyncIterator[bytes]) -> bytes:
        """Return the bytes of a gRPC call's only request.

        Raises RequestError if none arrives in time.
        """
        try:
            async with asyncio.timeout(self._seconds):
                return await anext(requests)
        except TimeoutError:
            raise SlowClientError(f"no request came within {self._seconds:g} s") from None
        except StopAsyncIteration:
            raise RequestError("the call has no request") from None

    @contextmanager
    def _place(self, client: str) -> Iterator[None]:
        """Count a gRPC call among those of its client during the `with`.

        Raises OverloadError if the client has its maximum number of calls already.
        """
        if self._of_client is not None and self._calls[client] >= self._of_client:
            raise OverloadError("too many calls of one client", retry_after=1.0)
        self._calls[client] += 1
        try:
            yield
        finally:
            self._calls[client] -= 1
            if not self._calls[client]:
                del self._calls[client]

    async def _stream(self, requests: Any, context: Any) -> None:
        del requests  # the context reads them one at a time
        metadata = _metadata(context)
        kinds = self._methods[STREAM]
        stream = GrpcStream(self._app, kinds, context, metadata, self._ending)
        try:
            with ExitStack() as place:
                if not self._has_token(metadata):
                    with stream.call():
                        self._check_token(metadata)
                place.enter_context(self._place(client_of_call(context)))
                await stream.run()
        except RequestError as e:
            await self._abort(context, e)

    async def _abort(self, context: Any, error: RequestError) -> None:
        if error.retry_after is not None:
            delay = str(int(1000 * max(error.retry_after, 0.001)))
            context.set_trailing_metadata((("retry-pushback-ms", delay),))
        await context.abort(self._codes[error.grpc], error.message)

    def _check_token(self, metadata: Mapping[str, str]) -> None:
        if not self._has_token(metadata):
            raise TokenError("a bearer token is needed")

    def _has_token(self, metadata: Mapping[str, str]) -> bool:
        if not self._token:
            return True
        scheme, _, value = metadata.get("authorization", "").partition(" ")
        right = hmac.compare_digest(value.encode(), self._token.encode())
        return scheme.lower() == "bearer" and right

    async def _live(self, message: Any, context: Any, request: Request) -> Any:
        del message, context, request
        return self._methods["ServerLive"].response(live=True)

    async def _ready(self, message: Any, context: Any, request: Request) -> Any:
        del message, context, request
        return self._methods["ServerReady"].response(ready=self._app.versions.ready)

    async def _model_ready(self, message: Any, context: Any, request: Request) -> Any:
        del context, request
        ready = self._app.versions.ready
        try:
            self._app.versions.find(message.name, message.version)
        except RequestError:
            ready = False
        return self._methods["ModelReady"].response(ready=ready)

    async def _server_metadata(self, message: Any, context: Any, request: Request) -> Any:
        del message, context, request
        return self._methods["ServerMetadata"].response(**self._app.first_service().server())

    async def _model_metadata(self, message: Any, context: Any, request: Request) -> Any:
        del context, request
        served = self._app.versions.find(message.name, message.version)
        document = served.service.metadata(message.name, message.version)
        return self._methods["ModelMetadata"].response(**document)

    async def _model_config(self, message: Any, context: Any, request: Request) -> Any:
        del context, request
        served = self._app.versions.find(message.name, message.version)
        document = number_enumerations(served.service.config(message.name, message.version))
        return self._methods["ModelConfig"].response(config=document)

    async def _model_statistics(self, message: Any, context: Any, request: Request) -> Any:
        del context, request
        rows = self._app.versions.statistics(message.name, message.version)
        return self._methods["ModelStatistics"].response(model_stats=rows)

    async def _infer(self, message: Any, context: Any, request: Request) -> Any:
        with self._app.versions.lease(message.model_name, message.model_version) as service:
            service.take(request, message.model_name)
            return await self._infer_with(service, message, context, request)

    async def _infer_with(
        self, service: Service, message: Any, context: Any, request: Request
    ) -> Any:
        tensors = read_request(message)
        service.set_limits(request, tensors.parameters, context.time_remaining())
        outputs, result = await service.infer(
            message.model_name, message.model_version, tensors, request
        )
        service.engine.metrics.success.add()
        request.result = result
        if result.truncated:
            context.set_trailing_metadata((("x-truncated-texts", str(result.truncated)),))
        kind = self._methods["ModelInfer"].response
        return build_response(kind, message, service.engine.model.version, outputs)


def _metadata(context: Any) -> dict[str, str]:
    return {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
