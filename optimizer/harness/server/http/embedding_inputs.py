"""Read the inputs of a request for embeddings: texts, token ids, and images.

"a text"    [1, 2, 3]                             OpenAI's
"data:image/png;base64,..."                       infinity's
{"text": "a text"}    {"image": BASE64 or "data:..."}     Jina's
{"type": "image_url", "image_url": {"url": "data:..."}}   OpenAI's part of a message
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from ...contract import Contract
from ..refusals import RequestError
from .openai_request import texts_or_ids

DATA, BASE64 = "data:image/", ";base64,"
PARTS = {"text": "text", "image_url": "image_url"}
"""{type of a part of a message: its field}."""


def read(document: Mapping[str, Any], name: str, contract: Contract) -> list[Any]:
    """Read the inputs of a request to /v1/embeddings.

    document: JSON of the request
    name: name of the model

    Returns a str per text, bytes per image, and a tuple of token ids per tokenized text. Raises
    RequestError for an image that the model does not accept, and for token ids unless the request's
    `tokenizer` names this model.
    """
    value = document.get("input")
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, Mapping) or _is_data(one) for one in values):
        return [_read(one, f"input {i}", contract) for i, one in enumerate(values)]
    entries = texts_or_ids(value, "input")
    ids = [tuple(one) for one in entries if not isinstance(one, str)]
    if document.get("tokenizer") not in (None, name):
        raise RequestError(
            f'tokenizer is not "{name}", the name of the model whose token ids are accepted',
            param="tokenizer",
        )
    if ids and contract.texts is not None:
        raise RequestError("input has token ids, and this model takes texts and images")
    if ids and document.get("tokenizer") is None:
        raise RequestError(
            "input has token ids, which are other words in each tokenizer; send texts (langchain: "
            "OpenAIEmbeddings(check_embedding_ctx_length=False)), or token ids of this model's own "
            f'tokenizer with "tokenizer": "{name}"',
            param="input",
        )
    if ids and len(ids) < len(entries):
        raise RequestError("input has both texts and token ids", param="input")
    return ids or entries


def _is_data(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(DATA)


def _read(value: Any, where: str, contract: Contract) -> Any:
    """Read one input of a request for embeddings: its text, or the bytes of its image.

    where: place of the input, for errors
    """
    if isinstance(value, Mapping):
        kind, value = _field(value, where)
    else:
        kind = "image" if _is_data(value) else "text"
    if not isinstance(value, str):
        raise RequestError(f"{where} is neither a text nor an image", param="input")
    return value if kind == "text" else read_image(value, where, contract)


def _field(value: Mapping[str, Any], where: str) -> tuple[str, Any]:
    """Return ("text" or "image", content) of an object in a request for embeddings. Raises
    RequestError for other fields."""
    part = PARTS.get(str(value.get("type")))
    fields = {name: one for name, one in value.items() if name != "type" or part is None}
    if part is not None and [*fields] == [part]:
        content = fields[part]
        if part == "image_url":
            return "image", content.get("url") if isinstance(content, Mapping) else content
        return "text", content
    if part is None and [*fields] in (["text"], ["image"]):
        return next(iter(fields.items()))
    raise RequestError(
        f'{where} is an object without a text or an image; accepted: {{"text": ...}}, '
        '{"image": BASE64}, {"type": "image_url", "image_url": {"url": "data:..."}}',
        param="input",
    )


def read_image(value: str, where: str, contract: Contract) -> bytes:
    """Decode an image that a request gives in base64 or as a data URL.

    where: place of the image, for errors

    Raises RequestError if the model accepts texts only, if the value is not base64, and for an
    address, which the server never fetches.
    """
    if contract.texts is None:
        raise RequestError(f"{where} is an image, and this model takes texts", param="input")
    content = value
    if value.startswith("data:"):
        head, mark, content = value.partition(BASE64)
        if not mark or not head.startswith(DATA):
            raise RequestError(
                f"{where} is a data URL without an image in base64; accepted: "
                "data:image/TYPE;base64,...",
                param="input",
            )
    if "://" in value[:16]:
        raise RequestError(
            f"{where} is an address, and the server fetches none; send the image in base64",
            param="input",
        )
    try:
        return base64.b64decode(content, validate=True)
    except ValueError:
        raise RequestError(f"{where} is an image that is not base64", param="input") from None
