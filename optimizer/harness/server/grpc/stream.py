"""ModelStreamInfer, Triton's extension: requests on one stream, and answers on it as they are made.

A model that continues texts gives a response for each token: `text` [1] is what that adds, perhaps
nothing, and all of them one after the other are the text of `predict`. Other models give one, in
the order of the requests. The parameter triton_final_response says whether a response is the last
of its request, whose id each has. A request that is refused has a response with an error_message,
and the stream goes on; with the metadata triton_grpc_error: true it ends with the error's code.
https://github.com/triton-inference-server/server/blob/main/docs/user_guide/decoupled_models.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager, aclosing
from typing import TYPE_CHECKING, Any

from ..refusals import RequestError
from ..scheduling.decoding import Decoding
from ..scheduling.engine import Result
from .messages import STREAM, Method
from .tensors import client_of_call, parsed, request_of, response_of

if TYPE_CHECKING:
    from ..http.app import App
    from ..http.exchange import Record
    from ..inference import Named, Service

AT_ONCE = 64  # requests of one stream; the next is read when one is answered
FINAL = "triton_final_response"
STRICT = "triton_grpc_error"


class Stream:
    """One call. kinds: the classes of its messages. context: gRPC's. ending: set when the server
    ends; what was received is answered then, and no more is read."""

    def __init__(
        self,
        app: App,
        kinds: Method,
        context: Any,
        metadata: Mapping[str, str],
        ending: asyncio.Event,
    ) -> None:
        self._app, self._kinds, self._context = app, kinds, context
        self._metadata, self._ending = metadata, ending
        self._left = False  # the client has
        self._strict = metadata.get(STRICT, "").lower() in ("true", "1")
        self._free, self._writing = asyncio.Semaphore(AT_ONCE), asyncio.Lock()

    def call(self) -> AbstractContextManager[Record]:
        """See App.call; of one request, or of a stream that is refused as a whole."""
        return self._app.call(f"grpc {STREAM}", self._metadata)

    async def run(self) -> None:
        """Answer until the client sends no more. Raises RequestError where that ends the stream."""
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
        """The next request as it came; None where there is none more, or the server ends."""
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
        """before: the requests that came earlier were answered; done: to be set when this one is,
        or when none has to wait for it."""
        message = None
        try:
            with self.call() as record, self._app.bodies.room(len(data)):
                client = client_of_call(self._context)
                message = await parsed(self._app, self._kinds.request, data, client)
                await self._answered(message, record, before, done)
        except RequestError as e:
            if self._strict or message is None:  # not a message
                raise
            await before.wait()
            response = self._kinds.response(error_message=e.message)
            response.infer_response.id = message.id
            await self._write(response)
        finally:
            done.set()
            self._free.release()

    async def _answered(
        self, message: Any, record: Record, before: asyncio.Event, done: asyncio.Event
    ) -> None:
        name, version = message.model_name, message.model_version
        with self._app.versions.lease(name, version) as service:
            record.service = service
            request = request_of(message)
            client = client_of_call(self._context)
            call = service.call(client, request.parameters, self._context.time_remaining())
            if not isinstance(service.engine, Decoding):
                outputs, result = await service.infer(name, version, request, call)
                await before.wait()
                await self._write(self._response(message, service, outputs, last=True))
                service.engine.metrics.success.add()
                record.answered(result)
                return
            done.set()
            result = Result([])
            try:
                async with aclosing(service.pieces(name, version, request, call, result)) as parts:
                    async for outputs, last in parts:
                        await self._write(self._response(message, service, outputs, last=last))
                service.engine.metrics.success.add()
            finally:
                record.answered(result)

    def _response(self, message: Any, service: Service, outputs: Named, *, last: bool) -> Any:
        response = self._kinds.response()
        kind, version = type(response.infer_response), service.engine.model.version
        response.infer_response.CopyFrom(response_of(kind, message, version, outputs))
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
