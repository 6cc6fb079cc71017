"""The part of OpenAI's HTTP interface that a model of embeddings has.

https://platform.openai.com/docs/api-reference/embeddings/create
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..answer_size import check_answer
from ..beside import LARGE
from ..inference import Service
from ..refusals import RequestError, UnknownError
from ..scheduling.engine import Call, Result
from ..tensors import JSON_NUMBER
from ..versions.versions import Served
from .asgi import COMPACT, Response

FORMATS = ("float", "base64")
FIELD = "embedding"
PATHS = ("embeddings", "completions", "chat/completions")  # below /v1, whose requests hold texts
KNOWN = ("input", "model", "encoding_format", "dimensions", "user")


def models(names: Sequence[str], created: int) -> dict[str, Any]:
    """GET /v1/models."""
    entries = [
        {"id": name, "object": "model", "created": created, "owned_by": "bundle"} for name in names
    ]
    return {"object": "list", "data": entries}


def named(current: Sequence[Served], name: object) -> Served:
    """The model that a request names. Raises UnknownError."""
    for served in current:
        if served.name == name:
            return served
    names = [served.name for served in current]
    raise UnknownError(
        f"unknown model; here {'is' if len(names) == 1 else 'are'} {' and '.join(names)}",
        param="model",
        code="model_not_found",
    )


async def embeddings(
    service: Service, document: Mapping[str, Any], call: Call
) -> tuple[Response, Result]:
    """POST /v1/embeddings. Raises RequestError."""
    model = service.engine.model
    fields = model.task.tensors(model.contract)
    if FIELD not in fields:
        raise UnknownError(f"the model does {model.task.name}; ask /v2/models/{service.name}/infer")
    if model.contract.input_kind != "text":
        raise UnknownError(
            f"the model takes {model.contract.input_kind}s; ask /v2/models/{service.name}/infer"
        )
    unknown = sorted(set(document) - set(KNOWN))
    if unknown:
        raise RequestError(f"{len(unknown)} unknown fields; accepted: {', '.join(KNOWN)}")
    encoding = document.get("encoding_format", FORMATS[0])
    if encoding not in FORMATS:
        raise RequestError(f"unknown encoding_format; accepted: {', '.join(FORMATS)}")
    width = fields[FIELD][1][0]
    if document.get("dimensions") not in (None, width):
        raise RequestError(f"dimensions cannot be chosen: the model has {width}")
    value = document.get("input")
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise RequestError("input is neither a text nor a list of texts")
    size = len(texts) * width * JSON_NUMBER
    check_answer(size, service.largest)
    result = await service.answer(texts, None, call)
    work = partial(_embedded, service.name, result, encoding)
    if size > LARGE:
        return await service.engine.beside.run(call.client, work), result
    return work(), result


def _embedded(name: str, result: Result, encoding: str) -> Response:
    """The answer; each embedding is written by itself, as no other thread runs meanwhile."""
    data = [
        COMPACT({"object": "embedding", "index": i, "embedding": _encoded(a[FIELD], encoding)})
        for i, a in enumerate(result.answers)
    ]
    usage = {"prompt_tokens": result.tokens, "total_tokens": result.tokens}
    rest = COMPACT({"model": name, "usage": usage})[1:]
    return Response(f'{{"object":"list","data":[{",".join(data)}],{rest}'.encode())


def error(refusal: RequestError) -> dict[str, Any]:
    """The body of an error."""
    kind = "invalid_request_error" if refusal.http < 500 else "server_error"
    code = refusal.code or refusal.http
    return {
        "error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": code}
    }


def _encoded(vector: list[float], encoding: str) -> Any:
    if encoding == FORMATS[0]:
        return vector
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
