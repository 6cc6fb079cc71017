"""Send load-test requests over gRPC, by the Open Inference Protocol v2."""

from __future__ import annotations

import asyncio
import base64
import time
from types import TracebackType
from typing import Any

from optimizer.foundation.errors import InputError, MachineError
from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.server.grpc import messages
from optimizer.load_test.open_loop import Metadata, Reply
from optimizer.load_test.requests import RequestKind

SCHEME = "grpc://"
LOAD = ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
"""gRPC statuses of requests that are refused for load, as 503 or 429 over HTTP."""


class GrpcClient:
    """Client of a load test that sends its requests over gRPC. Raises MachineError where grpcio is
    not installed.

    name: name of the model; the protocol has no list of models
    token: bearer token, or ""
    patience: request timeout in seconds
    """

    def __init__(self, url: str, name: str, token: str, patience: float) -> None:
        try:
            import grpc
        except ImportError:
            raise MachineError(
                "grpcio is not installed", where=url, fix="pip install grpcio protobuf"
            ) from None
        self.url, self._name, self._patience = url, name, patience
        self._grpc = grpc
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._methods = messages.methods()

    async def __aenter__(self) -> GrpcClient:
        self._channel = self._grpc.aio.insecure_channel(
            self.url.removeprefix(SCHEME), [("grpc.max_receive_message_length", -1)]
        )
        service = f"/{messages.PACKAGE}.{messages.SERVICE}"
        self._calls = {
            name: self._channel.unary_unary(
                f"{service}/{name}",
                request_serializer=self._methods[name].request.SerializeToString,
                response_deserializer=self._methods[name].response.FromString,
            )
            for name in messages.METHODS
        }
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def model(self) -> str:
        try:
            await self._call("ModelMetadata", name=self._name)
        except self._grpc.aio.AioRpcError as e:
            where = f"{self.url}, model {self._name!r}"
            if e.code().name == "UNAVAILABLE":
                raise MachineError(
                    f"no answer ({e.details()})", where=where, fix="Is the server running?"
                ) from None
            raise InputError(
                f"{e.code().name}: {e.details()}", where=where, fix="Give the name by --model."
            ) from None
        return self._name

    async def inputs(self, model: str) -> list[Metadata]:
        response = await self._call("ModelMetadata", name=model)
        return [
            {"name": i.name, "datatype": i.datatype, "shape": list(i.shape)}
            for i in response.inputs
        ]

    async def kind(self, model: str, column: str, value: str) -> RequestKind:
        kind = RequestKind("grpc infer", str, lambda *_: {}, str, column=column)
        outcome = await self.ask(kind, model, value, Reply(0.0), time.perf_counter())
        if outcome.status != 200:
            raise InputError(
                outcome.lost or f"status {outcome.status}",
                where=self.url,
                accepted="a server that answers ModelInfer",
            )
        return kind

    async def ask(
        self, kind: RequestKind, model: str, value: str, outcome: Reply, start: float
    ) -> Reply:
        data = base64.b64decode(value) if kind.column == IMAGE.columns[0] else value.encode()
        tensor = {"name": kind.column, "datatype": "BYTES", "shape": [1]}
        outcome.sent = time.perf_counter() - start
        try:
            async with asyncio.timeout(self._patience):
                response = await self._call(
                    "ModelInfer",
                    model_name=model,
                    inputs=[tensor],
                    raw_input_contents=[len(data).to_bytes(4, "little") + data],
                )
            outcome.status = 200
            parts = (*(o.name for o in response.outputs), *response.raw_output_contents)
            outcome.answer = repr(parts)
        except TimeoutError:
            outcome.lost = "no answer in time"
        except self._grpc.aio.AioRpcError as e:
            if e.code().name in LOAD:
                outcome.status = 503
            else:
                outcome.lost = e.code().name
        outcome.ended = time.perf_counter() - start
        outcome.pieces.append(outcome.ended)
        return outcome

    async def _call(self, method: str, **fields: Any) -> Any:
        request = self._methods[method].request(**fields)
        return await self._calls[method](request, metadata=self._metadata)
