"""Answer the Open Inference Protocol v2 over HTTP, and Triton's /v2/repository."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from ..answer_size import check_answer
from ..inference import Service
from ..refusals import RequestError
from ..request import Result
from ..tensors import InferRequest, answer_bytes, datatype, read, read_object, write
from ..versions.versions import Versions
from ..worker_threads import LARGE
from .request import Document, HttpRequest, whole_header

if TYPE_CHECKING:
    from .app import App

JSON = "application/json"

LENGTH = "inference-header-content-length"
Load = Callable[[str], Awaitable[None]]


async def ready(versions: Versions, request: HttpRequest, name: str, version: str = "") -> Response:
    """Answer GET /v2/models/NAME/ready."""
    request.accept("ready", "GET")
    versions.find(name, version)
    return Document({"name": name, "ready": versions.ready}, 200 if versions.ready else 503)


async def metadata(
    versions: Versions, request: HttpRequest, name: str, version: str = ""
) -> Response:
    """Answer GET /v2/models/NAME."""
    request.accept("v2 metadata", "GET")
    document = versions.find(name, version).service.metadata(name, version)
    numbers = [s.version for s in versions.all if name in s.service.names]
    return Document(document | ({} if version else {"versions": numbers}))


async def config(
    versions: Versions, request: HttpRequest, name: str, version: str = ""
) -> Response:
    """Answer GET /v2/models/NAME/config, Triton's."""
    request.accept("v2 config", "GET")
    return Document(versions.find(name, version).service.config(name, version))


async def statistics(
    versions: Versions, request: HttpRequest, name: str = "", version: str = ""
) -> Response:
    """Answer GET /v2/models/NAME/stats, Triton's; of all models without a name."""
    request.accept("v2 statistics", "GET")
    return Document({"model_stats": versions.statistics(name, version)})


async def infer(versions: Versions, request: HttpRequest, name: str, version: str = "") -> Response:
    """Answer POST /v2/models/NAME/infer. Raises RequestError, ClientDisconnect."""
    request.accept("v2 infer", "POST")
    service = request.lease(versions.route(name, version), name)
    body = await request.body()
    request.admit(service)
    length = whole_header(request.headers, LENGTH)
    values = request.security.values
    tensors = await request.parse(body, partial(read, document_length=length, values=values))
    service.set_limits(request, tensors.parameters, request.timeout())

    async def work() -> Response:
        outputs, result = await service.infer(name, version, tensors, request)
        return await _answer(request, service, tensors, (name, outputs, result))

    return await request.while_connected(work())


async def index(versions: Versions, request: HttpRequest) -> Response:
    """Answer POST /v2/repository/index."""
    request.accept("v2 index", "POST")
    return Response(versions.index(), media_type=JSON)


async def load(app: App, request: HttpRequest, name: str) -> Response:
    """Answer POST /v2/repository/models/NAME/load: reload the model from its bundle's path. Raises
    RequestError."""
    request.accept_owner("v2 load")
    served = app.versions.find(name)
    body = await request.body()
    if body and (await request.parse(body, read_object)).get("parameters"):
        raise RequestError("load takes no parameters; the server knows where models lie")
    if app.load is not None:
        await app.load(served.name)
    return Document({})


async def _answer(
    request: HttpRequest,
    service: Service,
    tensors: InferRequest,
    answered: tuple[str, list[tuple[str, Any]], Result],
) -> Response:
    name, outputs, result = answered
    start = time.perf_counter()
    head = {"model_name": name, "model_version": service.engine.model.version}
    head |= {"id": tensors.id} if tensors.id else {}
    binary = {o.name: o.binary for o in tensors.outputs or ()}
    columns = [(n, array, binary.get(n, tensors.binary)) for n, array in outputs]
    size = sum(answer_bytes(datatype(str(a.dtype)), a.size, raw) for _, a, raw in columns)
    check_answer(size, service.largest)
    work = partial(write, head, columns)
    if size > LARGE:
        body, length = await service.engine.worker_threads.run(request.client, work)
    else:
        body, length = work()
    service.engine.metrics.postprocess.observe(time.perf_counter() - start)
    if length is None:
        return request.finish(Response(body, media_type=JSON), result)
    headers = {LENGTH: str(length)}
    response = Response(body, headers=headers, media_type="application/octet-stream")
    return request.finish(response, result)
