"""What a request is and what of an answer is compared, by the paths that a server has.

    embeddings    /v1/embeddings              the vector, as its bytes
    completions   /v1/completions, streamed   the text; each piece is noted as it comes
    infer         /v2/models/NAME/infer       the outputs, of a text or of an image
    grpc infer    ModelInfer                  the outputs

The same input is asked many times, and asked alone first: an answer under load must be that answer.
An image is the bytes of a file, in base64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.text import TEXT


@dataclass(frozen=True)
class Kind:
    """path(model) and body(model, input, tokens) of a request; answer(document) of what came, the
    part that must not change; streamed: whether it comes in pieces, as server-sent events, of which
    answer takes one at a time. column: what an input is, "text" or "image"."""

    name: str
    path: Callable[[str], str]
    body: Callable[[str, str, int], Mapping[str, Any]]
    answer: Callable[[Any], str]
    streamed: bool = False
    column: str = TEXT.columns[0]


def _infer(name: str, column: str) -> Kind:
    return Kind(
        name,
        lambda model: f"/v2/models/{model}/infer",
        lambda _, value, __: {
            "inputs": [{"name": column, "datatype": "BYTES", "shape": [1], "data": [value]}]
        },
        lambda document: json.dumps(document["outputs"], sort_keys=True),
        column=column,
    )


BY_TEXT = (
    Kind(
        "embeddings",
        lambda _: "/v1/embeddings",
        lambda model, text, _: {"model": model, "input": text, "encoding_format": "base64"},
        lambda document: str(document["data"][0]["embedding"]),
    ),
    Kind(
        "completions",
        lambda _: "/v1/completions",
        lambda model, text, tokens: {
            "model": model,
            "prompt": text,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        },
        lambda document: str(document["choices"][0]["text"]) if document["choices"] else "",
        streamed=True,
    ),
    _infer("infer", TEXT.columns[0]),
)
"""In the order in which a server is asked for them."""
BY_FILE = (_infer("infer", IMAGE.columns[0]),)
