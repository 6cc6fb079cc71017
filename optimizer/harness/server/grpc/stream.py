"""Answer ModelStreamInfer, Triton's extension: requests and answers on one stream.

Text generation gives a response per token: `text` [1] is the text that it adds, perhaps empty, and
their concatenation is the text of `predict`. Other models give one response per request, in the
order of the requests. The parameter triton_final_response marks the last response of a request,
whose id each has. A refused request has a response with an error_message, and the stream
continues; with the metadata triton_grpc_error: true it ends with the error's status.
https://github.com/triton-inference-server/server/blob/main/docs/user_guide/decoupled_models.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager, aclosing
from typing import TYPE_CHECKING, Any

from ..refusals import RequestError
from ..request import Result
from ..scheduling.decoding import Decoding
from .messages import STREAM, GrpcMethod
from .tensors import build_response, client_of_call, parse, read_request

if TYPE_CHECKING:
    from ..http.app import App
    from ..inference import NamedArrays, Service
    from ..request import Request

AT_ONCE = 64  # maximum requests of one stream; the next is read when one is answered
FINAL = "triton_final_response"
STRICT = "triton_grpc_error"


class GrpcStream:
    """One gRPC call of ModelStreamInfer, a stream of requests.

    kinds: classes of its messages
    context: context of the call from gRPC
    metadata: metadata of the call
    ending: event that is set when the server ends; received requests are still answered, and no
        more are read
    """

    def __init__(
        self,
        app: App,
        kinds: GrpcMethod,
        context: Any,
        metadata: Mapping[str, str],
        ending: asyncio.Event,
    ) -> None:
        self._app, self._kinds, self._context = app, kinds, context
        self._metadata, self._ending = metadata, ending
        self._left = False  # true once the client has left
        self._strict = metadata.get(STRICT, "").lower() in ("true", "1")
        self._free, self._writing = asyncio.Semaphore(AT_ONCE), asyncio.Lock()

    def call(self) -> AbstractContextManager[Request]:
        """Count one request of a gRPC stream, from the start of this context to its end (App.call).
        A stream that is refused before it sent a request counts as one."""
        return self._app.call(f"grpc {STREAM}", self._metadata, client_of_call(self._context))

    async def run(self) -> None:
        """Answer the stream's requests until the client sends no more. Raises RequestError if the
        stream fails."""
        failed: RequestError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                before = asyncio.Event()
                before.set()
                while (data := await self._next()) is not None:
                    done = asyncio.Event()
                    group.create_task(self._answer(data, before, done))
                    before = done
        except* RequestError as e:
            failed = next(error for error in e.exceptions if isinstance(error, RequestError))
        if self._left:  # no status can be sent any more
            raise asyncio.CancelledError
        if failed is not None:
            raise failed

    async def _next(self) -> bytes | None:
        """Return the bytes of the client's next request on a gRPC stream; None after the last one,
        and when the server ends."""
        from grpc.aio import EOF

        await self._free.acquire()
        read = asyncio.ensure_future(self._context.read())
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait((read, ending), return_when=asyncio.FIRST_COMPLETED)
            data = read.result() if read.done() else EOF
        finally:
            for pending in (read, ending):
                pending.cancel()
            await asyncio.gather(read, ending, return_exceptions=True)
        return None if data is EOF else data

    async def _answer(self, data: bytes, before: asyncio.Event, done: asyncio.Event) -> None:
        """Answer one request of a gRPC stream.

        before: set once all earlier requests are answered
        done: set here once this request is answered, or later requests need not wait for it
        """
        message = None
        try:
            with self.call() as request, self._app.bodies.room(len(data)):
                message = await parse(self._app, self._kinds.request, data, request.client)
                await self._respond(message, request, before, done)
        except RequestError as e:
            if self._strict or message is None:  # it is not a message
                raise
            await before.wait()
            response = self._kinds.response(error_message=e.message)
            response.infer_response.id = message.id
            await self._write(response)
        finally:
            done.set()
            self._free.release()

    async def _respond(
        self, message: Any, request: Request, before: asyncio.Event, done: asyncio.Event
    ) -> None:
        """Write the responses to one parsed request of the stream; for arguments see `_answer`."""
        name, version = message.model_name, message.model_version
        with self._app.versions.lease(name, version) as service:
            service.take(request, name)
            tensors = read_request(message)
            service.set_limits(request, tensors.parameters, self._context.time_remaining())
            if not isinstance(service.engine, Decoding):
                outputs, result = await service.infer(name, version, tensors, request)
                await before.wait()
                await self._write(self._response(message, service, outputs, last=True))
                service.engine.metrics.success.add()
                request.result = result
                return
            done.set()
            result = Result([])
            try:
                async with aclosing(
                    service.pieces(name, version, tensors, request, result)
                ) as parts:
                    async for outputs, last in parts:
                        await self._write(self._response(message, service, outputs, last=last))
                service.engine.metrics.success.add()
            finally:
                request.result = result

    def _response(self, message: Any, service: Service, outputs: NamedArrays, *, last: bool) -> Any:
        response = self._kinds.response()
        kind, version = type(response.infer_response), service.engine.model.version
        response.infer_response.CopyFrom(build_response(kind, message, version, outputs))
        response.infer_response.parameters[FINAL].bool_param = last
        return response

    async def _write(self, response: Any) -> None:
        from grpc.aio import BaseError

        async with self._writing:
            try:
                await self._context.write(response)
            except BaseError:  # the client left: gRPC says so here before it cancels anything
                self._left = True
                raise asyncio.CancelledError from None
