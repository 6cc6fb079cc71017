"""What a request is and what of an answer is compared, by the paths that a server has.

    embeddings    /v1/embeddings              the vector, as its bytes
    completions   /v1/completions, streamed   the text; each piece is noted as it comes
    infer         /v2/models/NAME/infer       the outputs

The same text is asked many times, and asked alone first: an answer under load must be that answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """path(model) and body(model, text, tokens) of a request; answer(document) of what came, the
    part that must not change; streamed: whether it comes in pieces, as server-sent events, of which
    answer takes one at a time."""

    name: str
    path: Callable[[str], str]
    body: Callable[[str, str, int], Mapping[str, Any]]
    answer: Callable[[Any], str]
    streamed: bool = False


KINDS = {
    kind.name: kind
    for kind in (
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
        Kind(
            "infer",
            lambda model: f"/v2/models/{model}/infer",
            lambda _, text, __: {
                "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}]
            },
            lambda document: json.dumps(document["outputs"], sort_keys=True),
        ),
    )
}
"""In the order in which a server is asked for them."""
