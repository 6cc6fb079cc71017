"""Answer OpenAI's /v1/models and /v1/embeddings, and write its errors.

https://platform.openai.com/docs/api-reference/embeddings/create
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from starlette.responses import Response

from ...contract import Contract
from ...embedding_settings import FLOAT, TYPES
from ...errors import InputError
from ...tasks.embeddings.sentence_embedding import choose_form, convert
from ..answer_size import check_answer
from ..inference import Service
from ..model import PROMPT
from ..refusals import RequestError, UnknownError
from ..tensors import JSON_NUMBER, Array, read_object, write_elements
from ..versions.versions import Served, Versions
from ..worker_threads import LARGE
from . import embedding_inputs
from .request import Document, HttpRequest

FORMATS = ("float", "base64")
TYPE = "output_dtype"
FIELDS_OF_FORM = (TYPE, "dimensions")
NAMED = {FORMATS[0]: FLOAT, **{name: name for name in TYPES if name != FLOAT}}
"""{name in a request: type of the numbers}, as Voyage's output_dtype and Mixedbread's
encoding_format have them."""
FIELD = "embedding"
INPUT_TYPE = "input_type"
PATHS = ("embeddings", "completions", "chat/completions")  # paths below /v1 that take texts
FIELDS = (
    *("input", "model", "encoding_format", "dimensions", "user", "tokenizer"),
    *(PROMPT, INPUT_TYPE, TYPE),
)
DOCUMENT = ("document", "passage", "corpus")
SAME_PROMPTS = {
    "search_query": ("query",),
    "search_document": DOCUMENT,
    **dict.fromkeys(DOCUMENT, DOCUMENT),
}
"""{input_type of other APIs: prompts that it means, of which the first with a text is taken}."""


def models(names: Sequence[str], created: int) -> dict[str, Any]:
    """Return the body of the answer to GET /v1/models.

    names: names of the models
    created: seconds since 1970
    """
    entries = [
        {"id": name, "object": "model", "created": created, "owned_by": "bundle"} for name in names
    ]
    return {"object": "list", "data": entries}


def find_model(current: Sequence[Served], name: object) -> Served:
    """Return the served model that a request names. Raises UnknownError."""
    for served in current:
        if name in served.service.openai_names:
            return served
    names = [each for served in current for each in served.service.openai_names]
    raise UnknownError(
        f"unknown model; here {'is' if len(names) == 1 else 'are'} {' and '.join(names)}",
        param="model",
        code="model_not_found",
    )


async def read(
    request: HttpRequest, first: Service, versions: Versions, *, unnamed: bool = False
) -> tuple[Service, Mapping[str, Any]]:
    """Receive a request to the OpenAI API; return (service that answers it, JSON of its body).

    first: service of the first model, which, if it is the only one, admits the request before the
        body is parsed
    unnamed: True if a request may leave out the model where only one is served

    Raises RequestError, ClientDisconnect.
    """
    data = await request.body()
    only = len(versions.current) == 1  # of several models, the body says which
    if only:
        request.admit(first)
    body = await request.parse(data, partial(read_object, values=request.security.values))
    name = body.get("model")
    if name is None and only and unnamed:
        name = versions.current[0].name
    served = find_model(versions.current, name)
    version = request.headers.get("x-model-version", "")
    service = request.lease(versions.route(served.name, version))
    if not only:
        request.admit(service)
    return service, body


async def embeddings(
    service: Service, document: Mapping[str, Any], request: HttpRequest
) -> Response:
    """Answer POST /v1/embeddings. Raises RequestError.

    document: JSON of the body
    """
    service.set_limits(request, {}, request.timeout())
    model, width = service.engine.model, find_width(service)
    unknown = sorted(set(document) - set(FIELDS))
    if unknown:
        raise RequestError(f"{len(unknown)} unknown fields; accepted: {', '.join(FIELDS)}")
    encoding, form = _form(document, model.contract, width)
    inputs = embedding_inputs.read(document, service.name, model.contract)
    size = len(inputs) * width * JSON_NUMBER
    check_answer(size, service.largest)
    result = await service.answer(inputs, None, request, choose_prompt(document, model.contract))
    vectors = np.array([answer[FIELD] for answer in result.answers], np.float32)
    vectors = convert(model.contract.texts or model.contract, vectors, *form)
    work = partial(_write_embeddings, service.name, vectors, result.tokens, encoding)
    if size > LARGE:
        return request.finish(await service.engine.worker_threads.run(request.client, work), result)
    return request.finish(work(), result)


def find_width(service: Service) -> int:
    """Return the dimensions of the embeddings that a served model answers. Raises UnknownError for
    other tasks."""
    model = service.engine.model
    fields = model.task.tensors(model.contract)
    if FIELD not in fields:
        raise UnknownError(
            f"the model's task is {model.task.name}; its path is /v2/models/{service.name}/infer"
        )
    if model.contract.input_kind != "text" and model.contract.texts is None:
        raise UnknownError(
            f"the model takes {model.contract.input_kind}s; its path is "
            f"/v2/models/{service.name}/infer"
        )
    return int(fields[FIELD][1][0])


def _form(
    document: Mapping[str, Any], contract: Contract, width: int
) -> tuple[str, tuple[str, int]]:
    """Return (encoding_format, (type, dimensions)) of a request to /v1/embeddings. Raises
    RequestError for others.

    width: dimensions of the model's own vectors
    """
    encoding, kind = document.get("encoding_format", FORMATS[0]), document.get(TYPE)
    if kind is None and isinstance(encoding, str) and encoding in {*NAMED} - {*FORMATS}:
        encoding, kind = FORMATS[0], encoding
    if encoding not in FORMATS:
        accepted = ", ".join((*FORMATS, *(n for n in NAMED if n not in FORMATS)))
        raise RequestError(f"unknown encoding_format; accepted: {accepted}")
    if kind is not None and not (isinstance(kind, str) and kind in NAMED):
        raise RequestError(f"unknown {TYPE}; accepted: {', '.join(NAMED)}", param=TYPE)
    chosen = find_form(
        contract, kind or FORMATS[0], document.get("dimensions"), width, FIELDS_OF_FORM
    )
    return encoding, chosen


def find_form(
    contract: Contract, kind: str, dimensions: Any, width: int, names: tuple[str, str]
) -> tuple[str, int]:
    """Return the (type, dimensions) of vectors that a request asks for.

    kind: type, a key of NAMED
    dimensions: requested dimensions; None for all
    width: dimensions of the model's own vectors
    names: fields of type and dimensions in the request, for errors

    Raises RequestError for a form that the model does not have.
    """
    whole = isinstance(dimensions, int) and not isinstance(dimensions, bool)
    if dimensions is not None and not (whole and 1 <= dimensions <= width):
        raise RequestError(
            f"{names[1]} is not a whole number from 1 to the model's {width}", param=names[1]
        )
    try:
        return choose_form(contract, NAMED[kind], dimensions)
    except InputError as e:
        param = names[e.where == "dimensions"]
        raise RequestError(f"{e.problem}; accepted: {e.accepted}", param=param) from None


def choose_prompt(document: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
    """Return {"prompt_name": name} if a request for embeddings chooses a prompt, else {}.

    It chooses by `prompt_name`, or by `input_type`, a word of other APIs. Raises RequestError for
    both.
    """
    name, kind = document.get(PROMPT), document.get(INPUT_TYPE)
    if name is not None and kind is not None:
        raise RequestError(f"{PROMPT} and {INPUT_TYPE} are both given", param=PROMPT)
    prompts = contract.vectors.all_prompts
    if isinstance(kind, str) and not prompts.get(kind):
        names = [n for n in SAME_PROMPTS.get(kind, ()) if n in prompts]
        kind = next((n for n in names if prompts[n]), names[0] if names else kind)
    chosen = kind if name is None else name
    return {} if chosen is None else {PROMPT: chosen}


def _write_embeddings(name: str, vectors: Array, tokens: int, encoding: str) -> Response:
    data = [
        {"object": "embedding", "index": i, "embedding": _encode(vector, encoding)}
        for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return Document({"object": "list", "data": data, "model": name, "usage": usage})


def build_error(refusal: RequestError) -> dict[str, Any]:
    """Return the body of the response to a refused request."""
    kind = "invalid_request_error" if refusal.http < 500 else "server_error"
    code = refusal.code or refusal.http
    return {
        "error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": code}
    }


def _encode(vector: Array, encoding: str) -> Any:
    if encoding == FORMATS[0]:
        return write_elements(vector)
    return base64.b64encode(vector.astype(vector.dtype.newbyteorder("<")).tobytes()).decode()
