"""Answer /v2/embed: texts or images as vectors of one or several types, in Cohere's form.

https://docs.cohere.com/reference/embed
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from starlette.responses import Response

from ....contract import Contract
from ....tasks.embeddings.sentence_embedding import convert
from ...answer_size import check_answer
from ...inference import Service
from ...model import PROMPT
from ...refusals import RequestError, TooLargeError
from ...request import Result
from ...tensors import JSON_NUMBER, write_elements
from ...worker_threads import LARGE
from ..embedding_inputs import read_image
from ..openai import FIELD, FORMATS, INPUT_TYPE, NAMED, choose_prompt, find_form, find_width
from ..request import Document, HttpRequest

PATH = "/v2/embed"
TYPES, DIMENSIONS = "embedding_types", "output_dimension"
IMAGES = "images"
FIELDS = ("model", "texts", IMAGES, INPUT_TYPE, PROMPT, TYPES, DIMENSIONS, "truncate")
Forms = Mapping[str, tuple[str, int]]
"""{name of a type in the request: (type, dimensions)}."""


async def answer(service: Service, body: Mapping[str, Any], request: HttpRequest) -> Response:
    """Answer a request to /v2/embed. Raises RequestError.

    body: JSON of the request
    """
    service.set_limits(request, {}, request.timeout())
    width, contract = find_width(service), service.engine.model.contract
    of_texts = contract.texts or contract
    fields = {name: value for name, value in body.items() if value is not None}
    if unknown := set(fields) - set(FIELDS):
        raise RequestError(f"{len(unknown)} unknown fields; accepted: {', '.join(FIELDS)}")
    inputs = _inputs(fields, contract)
    cut = fields.get("truncate", "END")
    if cut not in ("END", "NONE"):
        raise RequestError(
            "truncate is neither END (cut long texts at their end) nor NONE (refuse them)",
            param="truncate",
        )
    kinds = fields.get(TYPES, [FORMATS[0]])
    if not isinstance(kinds, list) or not kinds or not all(kind in [*NAMED] for kind in kinds):
        raise RequestError(f"{TYPES} is not a list of {', '.join(NAMED)}", param=TYPES)
    forms = {
        kind: find_form(contract, kind, fields.get(DIMENSIONS), width, (TYPES, DIMENSIONS))
        for kind in kinds
    }
    size = len(inputs) * width * JSON_NUMBER * len(forms)
    check_answer(size, service.largest)
    prompt = {} if IMAGES in fields else choose_prompt(fields, of_texts)
    result = await service.answer(inputs, None, request, prompt)
    if result.truncated and cut == "NONE":
        raise TooLargeError(
            f"{result.truncated} texts have more than the {of_texts.text.max_length} tokens that "
            "the model reads; send truncate: END to cut them"
        )
    texts = fields.get("texts", [])
    work = partial(_write, service, texts, result, forms, request.id)
    if size > LARGE:
        return request.finish(await service.engine.worker_threads.run(request.client, work), result)
    return request.finish(work(), result)


def _inputs(fields: Mapping[str, Any], contract: Contract) -> list[Any]:
    """Read the texts, or the bytes of the images, of a request to /v2/embed.

    Raises RequestError if it has both, and the errors of read_image.
    """
    named = [name for name in ("texts", IMAGES) if name in fields]
    if len(named) != 1:
        raise RequestError("accepted is one of texts and images", param="texts")
    values = fields[named[0]]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise RequestError(f"{named[0]} is not a list of {named[0]}", param=named[0])
    if named == ["texts"]:
        return values
    return [read_image(value, f"images[{i}]", contract) for i, value in enumerate(values)]


def _write(
    service: Service, texts: list[str], result: Result, forms: Forms, identity: str
) -> Response:
    contract = service.engine.model.contract
    contract = contract.texts or contract
    vectors = np.array([one[FIELD] for one in result.answers], np.float32)
    return Document(
        {
            "id": identity,
            "embeddings": {
                name: [*map(write_elements, convert(contract, vectors, *form))]
                for name, form in forms.items()
            },
            "texts": texts,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": result.tokens},
            },
        }
    )
