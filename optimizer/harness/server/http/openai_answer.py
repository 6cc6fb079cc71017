"""Write answers to /v1/chat/completions and /v1/completions: a document, or a stream of chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..answers import Event
from ..tensors import write_json
from .openai_request import TextRequest

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
DONE = b"data: [DONE]\n\n"
UNFINISHED = "�"  # decoded form of an incomplete character


@dataclass
class AnswerWriter:
    """Writer of the OpenAI API's answer to one request, whole or as a stream.

    model: name of the model
    tokenizer: tokenizer that gives the text of single tokens
    tokens: number of generated tokens so far
    """

    request: TextRequest
    model: str
    tokenizer: Any
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    tokens: int = 0
    _begun: set[int] = field(default_factory=set)
    _offsets: dict[int, int] = field(default_factory=dict)

    def document(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return the whole answer to a request as one JSON document.

        events: tokens of all texts of the request
        """
        number = len(self.request.prompts.rows) * self.request.prompts.n
        by_text: list[list[Event]] = [[] for _ in range(number)]
        for event in events:
            by_text[event.piece.row].append(event)
        self.tokens = len(events)
        choices = [self._choice(i, some) for i, some in enumerate(by_text)]
        kind = "chat.completion" if self.request.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self.usage()}

    def chunks(self, event: Event) -> bytes:
        """Return the server-sent events for one token; b"" if it adds no text yet."""
        self.tokens += 1
        piece, chat = event.piece, self.request.chat
        parts = []
        if chat and piece.row not in self._begun:
            self._begun.add(piece.row)
            delta = {"role": "assistant", "content": ""}
            parts.append(self._chunk([self._delta(piece.row, delta, None, None)]))
        if piece.text or piece.finish or event.logprobs:
            finish = FINISH[piece.finish] if piece.finish else None
            logprobs = self._logprobs([event])
            if chat:
                delta = {"content": piece.text} if piece.text or not finish else {}
                parts.append(self._chunk([self._delta(piece.row, delta, logprobs, finish)]))
            else:
                choice = {"text": piece.text, "index": piece.row, "logprobs": logprobs}
                parts.append(self._chunk([{**choice, "finish_reason": finish}]))
        return b"".join(parts)

    def end(self) -> bytes:
        """Return the events that end the complete stream to a client: the usage if requested, and
        [DONE]."""
        usage = self._chunk([], usage=self.usage()) if self.request.usage else b""
        return usage + DONE

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens that a request took so far; a prompt counts once for all of
        its texts."""
        prompt = sum(map(len, self.request.prompts.rows))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.tokens,
            "total_tokens": prompt + self.tokens,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.request.chat else "cmpl"
        head = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created}
        return {**head, "model": self.model}

    def _chunk(self, choices: list[Any], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.request.chat else "text_completion"
        return event_line({**self._head(kind), "choices": choices, **more})

    def _choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        text = "".join(event.piece.text for event in events)
        finish = FINISH[str(events[-1].piece.finish)]
        logprobs = self._logprobs(events)
        if not self.request.chat:
            choice = {"text": text, "index": index, "logprobs": logprobs}
            return {**choice, "finish_reason": finish}
        message = {"role": "assistant", "content": text}
        choice = {"index": index, "message": message, "logprobs": logprobs}
        return {**choice, "finish_reason": finish}

    def _delta(
        self, index: int, delta: Mapping[str, Any], logprobs: Any, finish: str | None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        if self.request.prompts.logprobs is None:
            return None
        if self.request.chat:
            return {"content": [self._chat_logprobs(event) for event in events]}
        return self._text_logprobs(events)

    def _chat_logprobs(self, event: Event) -> dict[str, Any]:
        assert event.logprobs is not None
        top = [self._token(token, value) for token, value in event.logprobs.top]
        return {**self._token(event.piece.token, event.logprobs.chosen), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        data = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": data}

    def _text_logprobs(self, events: Sequence[Event]) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for event in events:
            assert event.logprobs is not None
            text, row = self._text(event.piece.token), event.piece.row
            columns["text_offset"].append(self._offsets.get(row, 0))
            columns["token_logprobs"].append(event.logprobs.chosen)
            columns["tokens"].append(text)
            top = {self._text(t): v for t, v in reversed(event.logprobs.top)}
            columns["top_logprobs"].append(top)
            self._offsets[row] = self._offsets.get(row, 0) + len(text)
        return columns

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


def event_line(value: Mapping[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + write_json(value) + b"\n\n"
