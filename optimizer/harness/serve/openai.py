"""The part of OpenAI's HTTP interface that a model of embeddings has.

https://platform.openai.com/docs/api-reference/embeddings/create
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from .engine import Result
from .inference import Service
from .refusals import RequestError, UnknownError

FORMATS = ("float", "base64")
FIELD = "embedding"
KNOWN = ("input", "model", "encoding_format", "dimensions", "user")


def models(service: Service, created: int) -> dict[str, Any]:
    """GET /v1/models."""
    entry = {"id": service.name, "object": "model", "created": created, "owned_by": "bundle"}
    return {"object": "list", "data": [entry]}


def unknown_model(service: Service) -> UnknownError:
    """What a request for another model is answered."""
    return UnknownError(
        f"unknown model; here is {service.name}", param="model", code="model_not_found"
    )


async def embeddings(
    service: Service, document: Mapping[str, Any], client: str, seconds: float | None
) -> tuple[dict[str, Any], Result]:
    """POST /v1/embeddings. Raises RequestError."""
    model = service.engine.model
    fields = model.task.tensors(model.contract)
    if FIELD not in fields:
        raise UnknownError(f"the model does {model.task.name}; ask /v2/models/{service.name}/infer")
    if model.contract.input_kind != "text":
        raise UnknownError(
            f"the model takes {model.contract.input_kind}s; ask /v2/models/{service.name}/infer"
        )
    if document.get("model") != service.name:
        raise unknown_model(service)
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
    result = await service.engine.answer(texts, None, service.call(client, {}, seconds))
    vectors = [answer[FIELD] for answer in result.answers]
    usage = {"prompt_tokens": result.tokens, "total_tokens": result.tokens}
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(vector, encoding)}
        for i, vector in enumerate(vectors)
    ]
    return {"object": "list", "data": data, "model": service.name, "usage": usage}, result


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
