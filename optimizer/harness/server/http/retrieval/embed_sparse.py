"""Answer /embed_sparse: texts as sparse vectors over the vocabulary, in the form of
text-embeddings-inference.

https://huggingface.github.io/text-embeddings-inference
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from ...answer_size import check_answer, predict_field_bytes
from ...inference import ANSWER, Service
from ...model import PROMPT, ServedModel
from ...refusals import RequestError, TooLargeError, UnknownError
from ...request import Result
from ...worker_threads import LARGE
from ..request import Document, HttpRequest

PATH = "/embed_sparse"
FIELDS = ("model", "inputs", PROMPT, "truncate", "truncation_direction")


async def answer(service: Service, body: Mapping[str, Any], request: HttpRequest) -> Response:
    """Answer a request to /embed_sparse. Raises RequestError.

    body: JSON of the request
    """
    model = service.engine.model
    if not isinstance(model, ServedModel) or not model.task.weighs:
        raise UnknownError(
            f"the model's task is {model.task.name}; its path is /v2/models/{service.name}/infer"
        )
    service.set_limits(request, {}, request.timeout())
    fields = {name: value for name, value in body.items() if value is not None}
    if unknown := set(fields) - set(FIELDS):
        raise RequestError(f"{len(unknown)} unknown fields; accepted: {', '.join(FIELDS)}")
    texts = fields.get("inputs")
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError("inputs is not a text or a list of texts", param="inputs")
    if fields.get("truncation_direction", "right") not in ("right", "Right"):
        raise RequestError("a text is cut at its end: leave it out", param="truncation_direction")
    cut = fields.get("truncate", True)
    if not isinstance(cut, bool):
        raise RequestError("truncate is not true or false", param="truncate")
    size = predict_field_bytes(model.task, model.contract, texts, {ANSWER: False})
    check_answer(size, service.largest)
    options = {PROMPT: fields[PROMPT]} if PROMPT in fields else {}
    result = await service.answer(texts, None, request, options)
    if result.truncated and not cut:
        raise TooLargeError(
            f"{result.truncated} texts have more than the {model.contract.text.max_length} tokens "
            "that the model reads; send truncate: true to cut them"
        )
    if size > LARGE:
        written = await service.engine.worker_threads.run(request.client, lambda: _write(result))
        return request.finish(written, result)
    return request.finish(_write(result), result)


def _write(result: Result) -> Response:
    return Document(
        [
            [
                {"index": index, "value": value}
                for index, value in sorted(zip(one["indices"], one["values"], strict=True))
            ]
            for one in result.answers
        ]
    )
