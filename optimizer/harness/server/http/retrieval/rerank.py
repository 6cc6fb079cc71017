"""Answer /rerank, /v1/rerank and /v2/rerank: the documents of a query, those that score highest
first.

Each path takes two forms of request. `texts` is that of text-embeddings-inference, whose answer is
a list; `documents` that of Jina and Cohere, whose answer is an object with `results`.
https://huggingface.github.io/text-embeddings-inference, https://api.jina.ai/docs,
https://docs.cohere.com/reference/rerank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response

from ...answer_size import ROW, check_answer
from ...inference import Service
from ...model import ServedModel
from ...refusals import RequestError, TooLargeError, UnknownError
from ...request import Result
from ...worker_threads import LARGE
from ..request import Document, HttpRequest

PATHS = {"/rerank": "", "/v1/rerank": "v1", "/v2/rerank": "v2"}  # version of the API
SHARED = ("model", "query", "raw_scores")
TEXTS = ("texts", "return_text", "truncate", "truncation_direction", *SHARED)
DOCUMENTS = ("documents", "top_n", "return_documents", "max_tokens_per_doc", "rank_fields", *SHARED)
UNIT = 6  # maximum bytes of a UTF-16 unit of a text in JSON: \u0000
FIELD = "text"  # of a document that is an object


@dataclass(frozen=True)
class RerankQuery:
    """Parsed request to the server to rank documents for a query.

    text: query
    documents: texts that are scored for `text`
    listed: True if the answer is text-embeddings-inference's list
    most: maximum number of documents in the answer
    raw: True if the answer has logits in place of scores
    returned: True if the answer has the texts of the documents
    cut: False if a text longer than the model's input is an error
    """

    text: str
    documents: Sequence[str]
    listed: bool
    most: int
    raw: bool
    returned: bool
    cut: bool


async def answer(
    service: Service, body: Mapping[str, Any], request: HttpRequest, version: str
) -> Response:
    """Answer a request to /rerank. Raises RequestError.

    body: JSON of the request
    version: version of the API; "" for the path without one
    """
    model = service.engine.model
    if not isinstance(model, ServedModel) or not model.task.ranks:
        raise UnknownError(
            f"the model's task is {model.task.name}; its path is /v2/models/{service.name}/infer"
        )
    service.set_limits(request, {}, request.timeout())
    query = read(body, model.limits.rows, model.contract.text.max_length)
    size = ROW * (1 + len(query.documents))
    if query.returned:
        size += sum(UNIT * len(t.encode("utf-16-le", "replace")) // 2 for t in query.documents)
    check_answer(size, service.largest)
    texts = [query.text] * len(query.documents)
    result = await service.answer(texts, query.documents, request)
    if result.truncated and not query.cut:
        raise TooLargeError(
            f"{result.truncated} texts have more than the {model.contract.text.max_length} tokens "
            "that the model reads, the query included; send truncate: true to cut them"
        )
    work = partial(_write, query, result, (service.name, request.id, version))
    if size > LARGE:
        return request.finish(await service.engine.worker_threads.run(request.client, work), result)
    return request.finish(work(), result)


def read(body: Mapping[str, Any], most: int, longest: int) -> RerankQuery:
    """Parse the JSON of a request to rank documents. Raises RequestError naming the field that is
    not accepted.

    most: maximum documents
    longest: maximum tokens that the model reads
    """
    fields = {name: value for name, value in body.items() if value is not None}
    listed = "texts" in fields
    name, accepted = ("texts", TEXTS) if listed else ("documents", DOCUMENTS)
    if unknown := set(fields) - set(accepted):
        both = (
            "; texts and documents are two forms" if {"texts", "documents"} <= set(fields) else ""
        )
        raise RequestError(
            f"{len(unknown)} unknown fields beside {name}; accepted: {', '.join(accepted)}{both}"
        )
    text = fields.get("query")
    if not isinstance(text, str) or not text.strip():
        raise RequestError("query is not a text with a word", param="query")
    if fields.get("truncation_direction", "right") not in ("right", "Right"):
        raise RequestError("a text is cut at its end: leave it out", param="truncation_direction")
    if fields.get("rank_fields", [FIELD]) != [FIELD]:
        raise RequestError(f'a document is read by its field "{FIELD}"', param="rank_fields")
    per_document = fields.get("max_tokens_per_doc", longest)
    if not isinstance(per_document, int) or per_document < longest:
        raise RequestError(
            f"query and document are cut at {longest} tokens together: leave it out",
            param="max_tokens_per_doc",
        )
    documents = _documents(fields.get(name), name, most)
    count = fields.get("top_n", len(documents))
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise RequestError("top_n is not a whole number from 1", param="top_n")
    return RerankQuery(
        text,
        documents,
        listed,
        min(count, len(documents)),
        _flag(fields, "raw_scores"),
        _flag(fields, "return_text") or _flag(fields, "return_documents"),
        _flag(fields, "truncate", default=True),
    )


def _documents(value: Any, name: str, most: int) -> list[str]:
    if not isinstance(value, list):
        raise RequestError(f"{name} is not a list of texts", param=name)
    if not 0 < len(value) <= most:
        raise TooLargeError(f"{len(value)} {name}; accepted: 1 to {most}", param=name)
    objects, texts = name == "documents", list[str]()
    for i, one in enumerate(value):
        text = one.get(FIELD) if objects and isinstance(one, dict) else one
        if not isinstance(text, str):
            kinds = f'a text, or an object with "{FIELD}"' if objects else "a text"
            raise RequestError(f"{name}[{i}] is not {kinds}", param=name)
        texts.append(text)
    return texts


def _flag(fields: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"{name} is not true or false", param=name)
    return value


def _write(query: RerankQuery, result: Result, about: tuple[str, str, str]) -> Response:
    """Write the answer to a request to rank documents, ordered by logit.

    about: (name of the model, id of the request, version of the API)

    Scores near 0 and 1 may be equal where logits differ. Documents of equal logit keep the order of
    the request.
    """
    logits = [one["logit"] for one in result.answers]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: query.most]
    scores = logits if query.raw else [one["score"] for one in result.answers]
    if query.listed:
        return Document(
            [
                {"index": i, "score": scores[i]}
                | ({FIELD: query.documents[i]} if query.returned else {})
                for i in order
            ]
        )
    name, identity, version = about
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {FIELD: query.documents[i]}} if query.returned else {})
        for i in order
    ]
    return Document(
        {
            "id": identity,
            "model": name,
            "results": results,
            "usage": {"prompt_tokens": result.tokens, "total_tokens": result.tokens},
            "meta": {
                "api_version": {"version": (version or "v1").removeprefix("v")},
                "tokens": {"input_tokens": result.tokens},
            },
        }
    )
