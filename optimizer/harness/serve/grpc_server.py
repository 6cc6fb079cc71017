"""The Open Inference Protocol v2 over gRPC, on the same event loop and engine as HTTP."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..errors import MachineError
from .app import App
from .exchange import Record
from .grpc_messages import PACKAGE, SERVICE, Method, methods
from .inference import Service
from .refusals import RequestError, TokenError
from .tensors import Array, OutputChoice, Request, checked_type, datatype, from_raw, to_raw

CONTENTS = {  # of InferTensorContents, by datatype; FP16 only comes raw
    "BOOL": "bool_contents",
    **{f"INT{n}": "int_contents" for n in (8, 16, 32)},
    "INT64": "int64_contents",
    **{f"UINT{n}": "uint_contents" for n in (8, 16, 32)},
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
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

    def __init__(self, app: App, largest: int, token: str) -> None:
        import grpc

        self._app, self._token, self._methods = app, token, methods()
        self._codes = {code.name: code for code in grpc.StatusCode}
        options = [
            ("grpc.max_receive_message_length", largest),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.aio.server(options=options)
        answers: dict[str, Answer] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(name, answers[name]),
                request_deserializer=method.request.FromString,
                response_serializer=method.response.SerializeToString,
            )
            for name, method in self._methods.items()
        }
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
        """Accept no call more, and give those that run so long."""
        await self._server.stop(seconds)

    def _guarded(self, name: str, answer: Answer) -> Callable[[Any, Any], Awaitable[Any]]:
        """The method with errors as status codes, which are counted, logged and traced."""

        async def guarded(request: Any, context: Any) -> Any:
            metadata = _metadata(context)
            try:
                with self._app.call(f"grpc {name}", metadata) as record:
                    if name not in ("ServerLive", "ServerReady", "ModelReady"):
                        self._check_token(metadata)
                    return await answer(request, context, record)
            except RequestError as e:
                error = e
            if error.retry_after is not None:
                delay = str(int(1000 * max(error.retry_after, 0.001)))
                context.set_trailing_metadata((("retry-pushback-ms", delay),))
            await context.abort(self._codes[error.grpc], error.message)

        return guarded

    def _check_token(self, metadata: Mapping[str, str]) -> None:
        if not self._token:
            return
        scheme, _, value = metadata.get("authorization", "").partition(" ")
        right = hmac.compare_digest(value.encode(), self._token.encode())
        if scheme.lower() != "bearer" or not right:
            raise TokenError("a bearer token is needed")

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
            self._app.versions.of(request.name, request.version)
        except RequestError:
            ready = False
        return self._methods["ModelReady"].response(ready=ready)

    async def _server_metadata(self, request: Any, context: Any, record: Record) -> Any:
        del request, context, record
        return self._methods["ServerMetadata"].response(**self._app.first().server())

    async def _model_metadata(self, request: Any, context: Any, record: Record) -> Any:
        del context, record
        served = self._app.versions.of(request.name, request.version)
        document = served.service.metadata(request.name, request.version)
        return self._methods["ModelMetadata"].response(**document)

    async def _infer(self, message: Any, context: Any, record: Record) -> Any:
        with self._app.versions.lease(message.model_name, message.model_version) as service:
            record.service = service
            return await self._inferred(service, message, context, record)

    async def _inferred(self, service: Service, message: Any, context: Any, record: Record) -> Any:
        request = _request(message)
        call = service.call(
            context.peer().rpartition(":")[0], request.parameters, context.time_remaining()
        )
        outputs, result = await service.infer(
            message.model_name, message.model_version, request, call
        )
        service.engine.metrics.success.add()
        record.answered(result)
        if result.truncated:  # the model read the beginning of so many texts
            context.set_trailing_metadata((("x-truncated-texts", str(result.truncated)),))
        return _response(self._methods["ModelInfer"], service, message, outputs)


def _metadata(context: Any) -> dict[str, str]:
    return {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}


def _request(message: Any) -> Request:
    """Raises RequestError for tensors that are not as they say."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise RequestError(f"{len(raw)} raw_input_contents for {len(message.inputs)} inputs")
    inputs: dict[str, Array] = {}
    for i, tensor in enumerate(message.inputs):
        where = f"inputs[{i}]"
        kind, shape = checked_type(tensor.datatype, list(tensor.shape), where)
        if tensor.name in inputs:
            raise RequestError(f"{where} has the name of another")
        if raw and tensor.HasField("contents"):
            raise RequestError(f"{where} has contents beside raw_input_contents")
        inputs[tensor.name] = (
            from_raw(raw[i], kind, shape, where) if raw else _typed(tensor, kind, shape, where)
        )
    outputs = [OutputChoice(o.name, True) for o in message.outputs] or None
    return Request(inputs, outputs, message.id, _parameters(message.parameters), True)


def _typed(tensor: Any, kind: str, shape: tuple[int, ...], where: str) -> Array:
    """A tensor from its typed contents, by way of its bytes."""
    if kind not in CONTENTS:
        raise RequestError(f"{where} is {kind}, which only comes raw")
    values = list(getattr(tensor.contents, CONTENTS[kind]))
    if kind == "BYTES":
        array = np.empty(len(values), object)
        array[:] = values
    else:
        try:
            array = np.array(values, kind.lower().replace("fp", "float"))
        except OverflowError:
            raise RequestError(f"{where} has numbers that {kind} does not hold") from None
    return from_raw(to_raw(array), kind, shape, where)


def _parameters(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        for key, value in entries.items()
    }


def _response(
    method: Method, service: Service, message: Any, outputs: list[tuple[str, Array]]
) -> Any:
    response = method.response(
        model_name=message.model_name,
        model_version=service.engine.model.version,
        id=message.id,
    )
    for name, array in outputs:
        kind = datatype(str(array.dtype))
        response.outputs.add(name=name, datatype=kind, shape=array.shape)
        response.raw_output_contents.append(to_raw(array))
    return response
