"""The Open Inference Protocol v2 over gRPC, on the same event loop and engine as HTTP."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

from ...errors import MachineError
from ..http.app import App
from ..http.exchange import Record
from ..inference import Service
from ..refusals import OverloadError, RequestError, SlowClientError, TokenError
from .messages import METHODS, PACKAGE, SERVICE, STREAM, methods
from .stream import Stream
from .tensors import client_of_call, parsed, request_of, response_of

Answer = Callable[[Any, Any, Record], Awaitable[Any]]


def check_installed() -> None:
    """Raises MachineError where the packages are not."""
    missing = [n for n in ("grpc", "google.protobuf") if not _there(n)]
    if missing:
        raise MachineError(
            f"not installed: {', '.join(missing)}",
            where="--grpc-port",
            fix="pip install grpcio protobuf (requirements-serve.txt of the bundle)",
        )


def _there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class GrpcServer:
    """Serves the application's model. The application says whether it is ready, counts and logs."""

    def __init__(self, app: App, calls: int | None = None, of_client: int | None = None) -> None:
        """calls, of_client: at once, at most, in all and of one client; None: any number."""
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
            "ModelInfer": self._infer,
        }
        handlers = {
            # one request, which is read with a limit of time: gRPC itself waits without one
            name: grpc.stream_unary_rpc_method_handler(
                self._guarded(name, answers[name]),
                request_deserializer=None,  # see grpc_tensors.parsed
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
        """Listen; returns the port. Raises MachineError where that is not possible."""
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            bound = 0
        if not bound:
            raise MachineError("cannot listen", where=f"{host}:{port}", fix="Try --grpc-port 0.")
        await self._server.start()
        return int(bound)

    async def close(self, seconds: float) -> None:
        """Accept no call more, and give those that run so long; streams end with the answers to
        what they have received."""
        self._ending.set()
        await self._server.stop(seconds)

    def _guarded(self, name: str, answer: Answer) -> Callable[[Any, Any], Awaitable[Any]]:
        """The method with errors as status codes, which are counted, logged and traced."""

        async def guarded(requests: Any, context: Any) -> Any:
            metadata = _metadata(context)
            try:
                with self._app.call(f"grpc {name}", metadata) as record, self._place(context):
                    if name not in ("ServerLive", "ServerReady", "ModelReady"):
                        self._check_token(metadata)
                    data = await self._only(requests)
                    with self._app.bodies.room(len(data)):
                        kind = self._methods[name].request
                        message = await parsed(self._app, kind, data, client_of_call(context))
                        return await answer(message, context, record)
            except RequestError as e:
                await self._abort(context, e)

        return guarded

    async def _only(self, requests: AsyncIterator[bytes]) -> bytes:
        """The one request of a call. Raises RequestError where it does not come in time."""
        try:
            async with asyncio.timeout(self._seconds):
                return await anext(requests)
        except TimeoutError:
            raise SlowClientError(f"no request came within {self._seconds:g} s") from None
        except StopAsyncIteration:
            raise RequestError("the call has no request") from None

    @contextmanager
    def _place(self, context: Any) -> Iterator[None]:
        """Of a call among those of its client. Raises OverloadError where there is none."""
        client = client_of_call(context)
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
        del requests  # the context reads them, one at a time
        metadata = _metadata(context)
        kinds = self._methods[STREAM]
        stream = Stream(self._app, kinds, context, metadata, self._ending)
        try:
            with ExitStack() as place:
                if not self._allowed(metadata):
                    with stream.call():
                        self._check_token(metadata)
                place.enter_context(self._place(context))
                await stream.run()
        except RequestError as e:
            await self._abort(context, e)

    async def _abort(self, context: Any, error: RequestError) -> None:
        if error.retry_after is not None:
            delay = str(int(1000 * max(error.retry_after, 0.001)))
            context.set_trailing_metadata((("retry-pushback-ms", delay),))
        await context.abort(self._codes[error.grpc], error.message)

    def _check_token(self, metadata: Mapping[str, str]) -> None:
        if not self._allowed(metadata):
            raise TokenError("a bearer token is needed")

    def _allowed(self, metadata: Mapping[str, str]) -> bool:
        if not self._token:
            return True
        scheme, _, value = metadata.get("authorization", "").partition(" ")
        right = hmac.compare_digest(value.encode(), self._token.encode())
        return scheme.lower() == "bearer" and right

    async def _live(self, request: Any, context: Any, record: Record) -> Any:
        del request, context, record
        return self._methods["ServerLive"].response(live=True)

    async def _ready(self, request: Any, context: Any, record: Record) -> Any:
        del request, context, record
        return self._methods["ServerReady"].response(ready=self._app.versions.ready)

    async def _model_ready(self, request: Any, context: Any, record: Record) -> Any:
        del context, record
        ready = self._app.versions.ready
        try:
            self._app.versions.find(request.name, request.version)
        except RequestError:
            ready = False
        return self._methods["ModelReady"].response(ready=ready)

    async def _server_metadata(self, request: Any, context: Any, record: Record) -> Any:
        del request, context, record
        return self._methods["ServerMetadata"].response(**self._app.first().server())

    async def _model_metadata(self, request: Any, context: Any, record: Record) -> Any:
        del context, record
        served = self._app.versions.find(request.name, request.version)
        document = served.service.metadata(request.name, request.version)
        return self._methods["ModelMetadata"].response(**document)

    async def _infer(self, message: Any, context: Any, record: Record) -> Any:
        with self._app.versions.lease(message.model_name, message.model_version) as service:
            record.service = service
            return await self._inferred(service, message, context, record)

    async def _inferred(self, service: Service, message: Any, context: Any, record: Record) -> Any:
        request = request_of(message)
        call = service.call(client_of_call(context), request.parameters, context.time_remaining())
        outputs, result = await service.infer(
            message.model_name, message.model_version, request, call
        )
        service.engine.metrics.success.add()
        record.answered(result)
        if result.truncated:  # the model read the beginning of so many texts
            context.set_trailing_metadata((("x-truncated-texts", str(result.truncated)),))
        kind = self._methods["ModelInfer"].response
        return response_of(kind, message, service.engine.model.version, outputs)


def _metadata(context: Any) -> dict[str, str]:
    return {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
