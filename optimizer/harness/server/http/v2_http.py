"""The Open Inference Protocol v2 over HTTP: /v2/models, and Triton's /v2/repository."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ..answer_size import check_answer
from ..beside import LARGE
from ..inference import Service
from ..refusals import RequestError, UnknownError
from ..scheduling.engine import Result
from ..tensors import Request, answer_bytes, datatype, read, read_object, written
from ..versions.versions import Versions
from .asgi import Response, document, while_connected, whole_header
from .exchange import Exchange

LENGTH = "inference-header-content-length"
Load = Callable[[str], Awaitable[None]]


async def model(
    exchange: Exchange, versions: Versions, name: str, version: str, rest: list[str]
) -> Response:
    """/v2/models/NAME and below it. Raises RequestError, Disconnected."""
    if rest == ["ready"]:
        exchange.accept("ready", "GET")
        versions.find(name, version)
        return document({"name": name, "ready": versions.ready}, 200 if versions.ready else 503)
    if not rest:
        exchange.accept("v2 metadata", "GET")
        metadata = versions.find(name, version).service.metadata(name, version)
        some = [s.version for s in versions.all if name in s.service.names]
        return document(metadata | ({} if version else {"versions": some}))
    if rest != ["infer"]:
        raise UnknownError("no such path")
    exchange.accept("v2 infer", "POST")
    service = exchange.lease(versions.route(name, version))
    body = await exchange.body()
    exchange.admit(service)
    length = whole_header(exchange.headers, LENGTH)
    values = exchange.security.values
    request = await exchange.parsed(body, partial(read, document_length=length, values=values))
    call = exchange.call(service, request.parameters)

    async def work() -> Response:
        outputs, result = await service.infer(name, version, request, call)
        return await _answer(exchange, service, request, (name, outputs, result))

    return await while_connected(work(), exchange.receive)


async def repository(
    exchange: Exchange, versions: Versions, load: Load | None, rest: list[str]
) -> Response:
    """/v2/repository/index, and .../models/NAME/load: the bundle of that model is opened again
    where it lies. Raises RequestError."""
    if rest == ["index"]:
        exchange.accept("v2 index", "POST")
        return Response(versions.index())
    match rest:
        case ["models", name, "load"]:
            exchange.accept_owner("v2 load")
            served = versions.find(name)
            body = await exchange.body()
            if body and (await exchange.parsed(body, read_object)).get("parameters"):
                raise RequestError("load takes no parameters; the server knows where models lie")
            if load is not None:
                await load(served.name)
            return document({})
    raise UnknownError("no such path")


async def _answer(
    exchange: Exchange,
    service: Service,
    request: Request,
    answered: tuple[str, list[tuple[str, Any]], Result],
) -> Response:
    name, outputs, result = answered
    start = time.perf_counter()
    head = {"model_name": name, "model_version": service.engine.model.version}
    head |= {"id": request.id} if request.id else {}
    binary = {o.name: o.binary for o in request.outputs or ()}
    tensors = [(n, array, binary.get(n, request.binary)) for n, array in outputs]
    size = sum(answer_bytes(datatype(str(a.dtype)), a.size, raw) for _, a, raw in tensors)
    check_answer(size, service.largest)
    work = partial(written, head, tensors)
    if size > LARGE:
        body, length = await service.engine.beside.run(exchange.client, work)
    else:
        body, length = work()
    service.engine.metrics.postprocess.observe(time.perf_counter() - start)
    response = Response(body)
    if length is not None:
        response.content_type = "application/octet-stream"
        response.headers[LENGTH] = str(length)
    return exchange.finished(response, result)
