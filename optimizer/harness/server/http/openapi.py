"""Describe the paths of the server: as an OpenAPI document, as a page, and as a short list.

The page loads nothing, because a server may have no way to the internet. Document and page are
answered without a token, and name no model.
https://spec.openapis.org/oas/v3.1.1.html
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TITLE = "optimize serve"
ABOUT = "Answers of one or several bundles. NAME is the name of a model: GET / lists them."
MODEL, VERSION = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
TEXT = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["what a lovely film"]}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
QUERY, ANSWERS = "how was the film", ["what a lovely film", "the soup is cold"]
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}"
    "pre{background:#8881;padding:.7rem;white-space:pre-wrap}"
    "h2{font:600 1rem monospace;margin:2rem 0 0}"
    ":root{color-scheme:light dark}"
)


@dataclass(frozen=True)
class Path:
    """Description of a path of the server's API.

    text: description, one sentence
    body: example of a request's JSON; {} for GET
    open: True if the path is answered without the server's token
    """

    text: str
    body: Mapping[str, Any] = field(default_factory=dict)
    method: str = "GET"
    open: bool = False


def _post(text: str, **body: Any) -> Path:
    return Path(text, body, "POST")


_METADATA = Path("Metadata of a model: inputs and outputs with types and shapes")
_READY = Path("Readiness of a model: 200 or 503", open=True)
_CONFIG = Path("Triton's configuration of a model: batch size, instances, batching")
_STATS = Path("Triton's statistics of a model: counts and nanoseconds by phase")
_INFER = _post("Answer texts, images or tensors (Open Inference Protocol v2)", inputs=[TEXT])
_RERANK = _post(
    "Score documents for a query, the best first (Jina, Cohere)",
    model="NAME",
    query=QUERY,
    documents=ANSWERS,
    top_n=1,
)
PATHS: dict[str, Path] = {
    "/": Path("Served models and the paths of the server"),
    "/docs": Path("This description as a page", open=True),
    "/openapi.json": Path("This description as an OpenAPI document", open=True),
    "/healthz": Path("Liveness", open=True),
    "/readyz": Path("Readiness: 200 or 503", open=True),
    "/metrics": Path("Metrics in Prometheus' text format"),
    "/v1/models": Path("Served models (OpenAI)"),
    "/v1/embeddings": _post(
        "Embed texts, token ids of the model's own tokenizer, or images (OpenAI, Jina)",
        model="NAME",
        input=["what a lovely film"],
    ),
    "/v1/chat/completions": _post(
        "Answer a conversation, at once or as server-sent events (OpenAI)",
        model="NAME",
        messages=MESSAGES,
        max_tokens=64,
    ),
    "/v1/completions": _post(
        "Continue a text, at once or as server-sent events (OpenAI)",
        model="NAME",
        prompt="The capital of France is",
        max_tokens=16,
    ),
    "/rerank": _post(
        "Score documents for a query, the best first (text-embeddings-inference, Jina, Cohere)",
        query=QUERY,
        texts=ANSWERS,
    ),
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/v2/embed": _post(
        "Embed texts as float32, int8, uint8, binary or ubinary (Cohere)",
        model="NAME",
        texts=["what a lovely film"],
        input_type="search_document",
        embedding_types=["float"],
    ),
    "/embed_sparse": _post(
        "Weigh the vocabulary for texts, by a sparse embedding (text-embeddings-inference)",
        inputs=["what a lovely film"],
    ),
    "/v2": Path("Name, version and extensions of the server"),
    "/v2/health/live": Path("Liveness", open=True),
    "/v2/health/ready": Path("Readiness: 200 or 503", open=True),
    "/v2/models/stats": Path("Triton's statistics of all models"),
    MODEL: _METADATA,
    VERSION: _METADATA,
    f"{MODEL}/config": _CONFIG,
    f"{VERSION}/config": _CONFIG,
    f"{MODEL}/stats": _STATS,
    f"{VERSION}/stats": _STATS,
    f"{MODEL}/ready": _READY,
    f"{VERSION}/ready": _READY,
    f"{MODEL}/infer": _INFER,
    f"{VERSION}/infer": _INFER,
    "/v2/repository/index": _post("Versions of all models and their states (Triton)"),
    "/v2/repository/models/{name}/load": _post("Reload a model from its bundle (Triton)"),
}


def list_paths() -> dict[str, str]:
    """Return {method and path: sentence} of every path of the server's API."""
    return {f"{p.method} {name}": p.text for name, p in PATHS.items()}


def build_document() -> dict[str, Any]:
    """Return the OpenAPI document of the server's API."""
    paths = {name: {p.method.lower(): _operation(name, p)} for name, p in PATHS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": "1", "description": ABOUT},
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(name: str, path: Path) -> dict[str, Any]:
    parameters = [
        {"name": n, "in": "path", "required": True, "schema": {"type": "string"}}
        for n in ("name", "version")
        if f"{{{n}}}" in name
    ]
    operation: dict[str, Any] = {
        "summary": path.text,
        "parameters": parameters,
        "responses": {
            "200": {"description": "the answer"},
            "default": {"description": "an error, with a sentence that says what is wrong"},
        },
        "security": [{}] if path.open else [{}, {"token": []}],
    }
    if path.body:
        content = {"application/json": {"schema": {"type": "object"}, "example": path.body}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def render_page() -> str:
    """Return the description of the server's API as an HTML page."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{TITLE}</title>"
        "<meta name=viewport content='width=device-width'>"
        f"<style>{STYLE}</style><h1>{TITLE}</h1><p>{ABOUT}</p>"
        "<p>With <code>--token-file</code>, paths marked <small>token</small> need "
        "<code>Authorization: Bearer TOKEN</code>. The same as a document for tools: "
        "<a href=/openapi.json>/openapi.json</a>.</p>"
    ]
    for name, path in PATHS.items():
        lock = "" if path.open else " <small>token</small>"
        parts.append(f"<h2>{path.method} {html.escape(name)}{lock}</h2><p>{html.escape(path.text)}")
        if path.body:
            parts.append(f"<pre>{html.escape(json.dumps(path.body))}</pre>")
    return "\n".join(parts)
