"""Read requests to /v1/chat/completions and /v1/completions.

https://platform.openai.com/docs/api-reference/chat/create and .../completions/create; also
top_k, min_p, repetition_penalty and ignore_eos, as in vLLM.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...bounds import TEXT as LONGEST
from ..answer_size import LOGPROB, check_answer
from ..answers import Prompts
from ..refusals import RequestError
from ..text_model import TextModel

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "ignore_eos")
SHARED = ("model", "n", "stop", "stream", "stream_options", "user", "response_format", *SAMPLING)
CHAT = ("messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", *SHARED)
TEXT = ("prompt", "max_tokens", "logprobs", *SHARED)
FORMATS = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": ...}'
NEUTRAL: Mapping[str, Any] = {  # fields that are not offered: their only accepted value
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "echo": False,
    "best_of": 1,
    "suffix": "",
    "metadata": {},
    "store": False,
}
SENT = ("stream", "stream_options")  # fields that do not change the text of the answer
BLANK = "?"  # placeholder of a question: some templates refuse an empty text
TEXT_TOKENS = 16  # default max_tokens of /v1/completions, as OpenAI's
LOGPROBS = 20  # maximum alternatives per token


@dataclass(frozen=True)
class TextRequest:
    """Parsed request to the OpenAI API for generated text.

    chat: True for a conversation, False for texts
    stream: True if the answer is sent as server-sent events
    usage: True if the stream ends with the numbers of tokens
    schema: JSON schema of the generated texts; None: free text
    repeatable: True if an equal request has an equal answer: greedy decoding, or a seed of the
        client
    question: last text, for the semantic cache; None for several texts, and for token ids
    logprob_bytes: maximum bytes of the log probabilities in the answer
    """

    prompts: Prompts
    chat: bool
    stream: bool
    usage: bool
    schema: Mapping[str, Any] | None = None
    repeatable: bool = False
    question: Question | None = None
    logprob_bytes: int = 0


@dataclass(frozen=True)
class Question:
    """Last text of a client's request, apart from the rest of the request.

    around: all other fields of the request, without those in SENT
    blank: the conversation with BLANK in place of the text; [] outside of a conversation
    """

    text: str
    around: Mapping[str, Any]
    blank: list[dict[str, Any]]


def read(document: Mapping[str, Any], model: TextModel, *, chat: bool) -> TextRequest:
    """Read the JSON of a request for generation. Raises RequestError naming the field that is not
    accepted."""
    accepted = CHAT if chat else TEXT
    fields = {name: value for name, value in document.items() if value is not None}
    _refuse_others(fields, accepted)
    stream, usage = _stream(fields)
    if chat:
        inputs = _conversation(fields, model.context)
    else:
        inputs = texts_or_ids(fields.get("prompt"), "prompt")
    rows = model.prompts(inputs)
    n = _whole(fields, "n", 1, 1, model.room.texts)
    if n * len(rows) > model.room.texts:
        raise RequestError(f"n texts of each prompt are more than {model.room.texts}", param="n")
    count = _logprobs(fields, chat)
    options = {name: fields[name] for name in SAMPLING if name in fields}
    options["max_new_tokens"] = _tokens(fields, model, rows, n, chat)
    tokens = n * len(rows) * options["max_new_tokens"]
    logprob_bytes = 0 if count is None else tokens * (count + 1) * LOGPROB
    if not stream:  # the server holds no tokens of a stream
        check_answer(logprob_bytes, model.room.answer, "Give a smaller max_tokens, or stream it")
    if "stop" in fields:
        stop = fields["stop"]
        options["stop"] = (stop,) if isinstance(stop, str) else stop
    schema = _schema(fields)
    rules = model.rules(options, schema)
    if n > 1 and not rules.sampling.do_sample and "temperature" not in options:
        raise RequestError(
            f"n is {n}, and this model takes the likeliest token unless a temperature is given, so "
            "that all texts would be the same; give a temperature above 0, such as 1, or n: 1",
            param="n",
        )
    repeatable = "seed" in options or not rules.sampling.do_sample
    if not repeatable:
        drawn = replace(rules.options, seed=secrets.randbits(62))
        rules = replace(rules, options=drawn)
    question = _question(fields, inputs, chat)
    adapter = model.adapter(fields.get("model", model.name), "model")
    prompts = Prompts(rows, rules, n, count, adapter)
    return TextRequest(prompts, chat, stream, usage, schema, repeatable, question, logprob_bytes)


def _question(fields: Mapping[str, Any], inputs: Sequence[Any], chat: bool) -> Question | None:
    around = {n: v for n, v in fields.items() if n not in SENT}
    if not chat:
        single = len(inputs) == 1 and isinstance(inputs[0], str)
        return Question(inputs[0], {**around, "prompt": None}, []) if single else None
    *before, last = inputs[0]
    if last["role"] != "user":
        return None
    blank = [*before, {**last, "content": BLANK}]
    return Question(last["content"], {**around, "messages": blank}, blank)


def _refuse_others(fields: Mapping[str, Any], accepted: Sequence[str]) -> None:
    for name in fields:
        if name in accepted:
            continue
        if name not in NEUTRAL:
            raise RequestError(f"unknown field; accepted: {', '.join(accepted)}")
        if fields[name] != NEUTRAL[name]:
            raise RequestError(f"{name} is not offered here: leave it out", param=name)


def _stream(fields: Mapping[str, Any]) -> tuple[bool, bool]:
    stream, options = fields.get("stream", False), fields.get("stream_options", {})
    if not isinstance(stream, bool):
        raise RequestError("stream is not true or false", param="stream")
    usage = options.get("include_usage", False) if isinstance(options, Mapping) else None
    if not isinstance(usage, bool) or set(options) - {"include_usage"}:
        raise RequestError(
            'stream_options is not {"include_usage": true or false}', param="stream_options"
        )
    if options and not stream:
        raise RequestError("stream_options without stream", param="stream_options")
    return stream, usage


def _schema(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the JSON schema of a request's response_format; None for free text."""
    form = fields.get("response_format", {"type": "text"})
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner = form.get("json_schema") if kind == "json_schema" else None
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, dict):
        raise RequestError(f"response_format is not {FORMATS}", param="response_format")
    return schema


def _conversation(fields: Mapping[str, Any], context: int) -> list[list[dict[str, Any]]]:
    """Read a request's messages; return a list with one conversation.

    Their number and characters are limited before the chat template renders them, which takes far
    longer.

    context: maximum tokens of the model
    """
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages is not a list of at least one", param="messages")
    if len(messages) > context:
        raise RequestError(
            f"{len(messages)} messages; the context has {context} tokens",
            param="messages",
            code="context_length_exceeded",
        )
    conversation = [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    size = sum(len(message["content"]) for message in conversation)
    if size > LONGEST:
        raise RequestError(
            f"messages have {size} characters; accepted: up to {LONGEST}",
            param="messages",
            code="context_length_exceeded",
        )
    return [conversation]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f'{where} is not {{"role": "user", "content": "..."}}', param="messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [p for p in content if isinstance(p, dict) and p.get("type") == "text"]
        texts = [p["text"] for p in parts if isinstance(p.get("text"), str)]
        if len(texts) != len(content) or not texts:
            raise RequestError(f"{where} has parts that are not texts", param="messages")
        content = "".join(texts)
    if not isinstance(content, str):
        raise RequestError(f"{where} has a content that is not a text", param="messages")
    return {**message, "content": content}


def texts_or_ids(value: Any, name: str) -> list[Any]:
    """Read the prompt of a request: a text, its token ids, or a list of either; return a list.
    Raises RequestError.

    name: field of the request, for errors
    """
    single = isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(isinstance(v, int) for v in value)
    )
    values: Any = [value] if single else value
    if not isinstance(values, list) or not values or not all(map(_is_text_or_ids, values)):
        raise RequestError(f"{name} is neither a text, token ids, nor a list of them", param=name)
    return values


def _is_text_or_ids(value: Any) -> bool:
    if isinstance(value, str):
        return True
    whole = isinstance(value, list) and bool(value)
    return whole and all(isinstance(v, int) and not isinstance(v, bool) for v in value)


def _tokens(
    fields: Mapping[str, Any], model: TextModel, rows: Sequence[Sequence[int]], n: int, chat: bool
) -> int:
    """Return the maximum new tokens per prompt of a request.

    This is the client's number, else the rest of the context (at most TEXT_TOKENS outside of a
    conversation). Raises RequestError if it exceeds the rest of the context.

    rows: token ids of the prompts
    n: number of texts per prompt
    """
    room = model.context - max(map(len, rows))
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in fields]
    if names:
        tokens = _whole(fields, names[0], 1, 1, 1 << 31)
    else:
        tokens = room if chat else min(room, TEXT_TOKENS)
    name = names[0] if names else "max_tokens"
    if tokens > room:
        raise RequestError(
            f"{name} is more than the {room} tokens that the context of {model.context} has left "
            "after the prompt",
            param=name,
            code="context_length_exceeded",
        )
    if sum(len(row) + tokens for row in rows) * n > model.most_tokens:
        raise RequestError(
            f"all texts of the request together may have {model.most_tokens} tokens; give {name}, "
            "a smaller n, or fewer prompts",
            param=name,
        )
    return tokens


def _logprobs(fields: Mapping[str, Any], chat: bool) -> int | None:
    if not chat:
        return _whole(fields, "logprobs", 0, 0, LOGPROBS) if "logprobs" in fields else None
    enabled = fields.get("logprobs", False)
    if not isinstance(enabled, bool):
        raise RequestError("logprobs is not true or false", param="logprobs")
    count = _whole(fields, "top_logprobs", 0, 0, LOGPROBS)
    if count and not enabled:
        raise RequestError("top_logprobs without logprobs", param="top_logprobs")
    return count if enabled else None


def _whole(fields: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} is not a whole number from {low} to {high}", param=name)
    return value
