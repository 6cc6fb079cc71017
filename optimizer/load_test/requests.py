"""Kinds of requests by path of the server, and the part of each answer that is compared.

    embeddings    /v1/embeddings              bytes of the vector
    completions   /v1/completions, streamed   text; the arrival of each piece is recorded
    infer         /v2/models/NAME/infer       outputs for a text or an image
    grpc infer    ModelInfer                  outputs

Each input is sent many times, and first alone: an answer under load must equal that answer. An
image is the bytes of a file in base64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.text import TEXT


@dataclass(frozen=True)
class RequestKind:
    """One kind of request that a load test sends.

    path: model's name -> path of the server
    body: (model's name, input, maximum new tokens) -> JSON body
    answer: JSON document of the answer, or of one piece -> part that is compared
    streamed: True where the answer comes as server-sent events
    column: kind of input, "text" or "image"
    """

    name: str
    path: Callable[[str], str]
    body: Callable[[str, str, int], Mapping[str, Any]]
    answer: Callable[[Any], str]
    streamed: bool = False
    column: str = TEXT.columns[0]


def _infer(name: str, column: str) -> RequestKind:
    return RequestKind(
        name,
        lambda model: f"/v2/models/{model}/infer",
        lambda _, value, __: {
            "inputs": [{"name": column, "datatype": "BYTES", "shape": [1], "data": [value]}]
        },
        lambda document: json.dumps(document["outputs"], sort_keys=True),
        column=column,
    )


BY_TEXT = (
    RequestKind(
        "embeddings",
        lambda _: "/v1/embeddings",
        lambda model, text, _: {"model": model, "input": text, "encoding_format": "base64"},
        lambda document: str(document["data"][0]["embedding"]),
    ),
    RequestKind(
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
"""Kinds for texts, in the order in which a server is tried."""
BY_FILE = (_infer("infer", IMAGE.columns[0]),)
