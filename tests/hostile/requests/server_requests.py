"""Short requests to a server that would make it do much: drawn at random, of each kind."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CHEAP = ("{}", "[]", "1", '""', "null", "[[]]", '{"a":1}', "1e9", '"\\u0041"')


@dataclass(frozen=True)
class Attack:
    """name: its kind. decoder: for text generation."""

    name: str
    path: str
    body: bytes
    decoder: bool
    headers: dict[str, str] = field(default_factory=dict)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _tensor(texts: list[str]) -> dict[str, Any]:
    return {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}


def repeated_outputs(draw: random.Random) -> Attack:
    """An answer as long as its outputs are named often."""
    texts = ["good"] * draw.randint(1, 64)
    names = draw.choice((["embedding"], ["embedding", "answer"])) * draw.randint(2, 2000)
    body = {"inputs": [_tensor(texts)], "outputs": [{"name": n} for n in names]}
    return Attack("repeated outputs", "/v2/models/tiny/infer", _json(body), False)


def many_positions(draw: random.Random) -> Attack:
    """Raw tensors as large as a byte for each number can say."""
    shape = [draw.randint(64, 256), draw.randint(64, 512)]
    data = [1] * (shape[0] * shape[1])
    names = ("input_ids", "attention_mask")
    inputs = [{"name": n, "datatype": "INT64", "shape": shape, "data": data} for n in names]
    return Attack(
        "many positions", "/v2/models/tiny-tensors/infer", _json({"inputs": inputs}), False
    )


def many_values(draw: random.Random) -> Attack:
    """A document of nothing, packed or not."""
    number = draw.randint(200_000, 2_000_000)
    inner = ",".join(draw.choices(CHEAP, k=50))
    body = ('{"a":[' + ",".join([inner] * (number // 50)) + "]}").encode()
    decoder = draw.random() < 0.5
    path = (
        "/v1/chat/completions"
        if decoder
        else draw.choice(("/v1/embeddings", "/v2/models/tiny/infer"))
    )
    if draw.random() < 0.5:
        packed = gzip.compress(body, 9)
        return Attack("many values", path, packed, decoder, {"content-encoding": "gzip"})
    return Attack("many values", path, body, decoder)


def many_messages(draw: random.Random) -> Attack:
    """A conversation longer than the model can read, in messages or in characters."""
    number = draw.choice((1, 40_000))
    content = draw.choice(("", "a ")) * (2_000_000 if number == 1 else 1)
    messages = [{"role": "user", "content": content or "a"}] * number
    if number == 1 and not content:
        messages *= 20_000
    body = {"model": "tiny-decoder", "messages": messages}
    return Attack("many messages", "/v1/chat/completions", _json(body), True)


def many_texts(draw: random.Random) -> Attack:
    """Answers of many prompts, each with many likely tokens."""
    body = {
        "model": "tiny-decoder",
        "prompt": ["good"] * draw.choice((1, 300, 40_000)),
        "n": draw.choice((1, 256, 10**9)),
        "max_tokens": draw.choice((1, 10**6)),
        "logprobs": 20,
        "ignore_eos": True,
    }
    return Attack("many texts", "/v1/completions", _json(body), True)


def endless_schema(draw: random.Random) -> Attack:
    """A schema that refers to itself."""
    name = draw.choice("ab")
    schema = draw.choice(
        (
            {"$ref": "#"},
            {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
            {"$defs": {name: {"$ref": f"#/$defs/{name}"}}, "$ref": f"#/$defs/{name}"},
        )
    )
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": "tiny-decoder", "prompt": "good", "response_format": wanted}
    return Attack("endless schema", "/v1/completions", _json(body), True)


KINDS: tuple[Callable[[random.Random], Attack], ...] = (
    repeated_outputs,
    many_positions,
    many_values,
    many_messages,
    many_texts,
    endless_schema,
)


def drawn(seed: int, each: int) -> list[Attack]:
    """So many of each kind."""
    draw = random.Random(seed)
    return [kind(draw) for _ in range(each) for kind in KINDS]
