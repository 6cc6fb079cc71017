"""Prompts of a generation request, and the tokens of its answers as they are made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..generate import Piece
from ..generate.logprobs import Logprobs
from ..generate.row import Rules
from .refusals import RequestError
from .request import Times


@dataclass(frozen=True)
class Prompts:
    """Prompts of a request.

    rows: token ids of each prompt
    rules: sampling rules
    n: texts per prompt; texts are numbered prompt by prompt
    logprobs: likeliest tokens reported with each token; None for no log probabilities
    adapter: name of the adapter that answers; "" for the model itself
    """

    rows: Sequence[Sequence[int]]
    rules: Rules
    n: int = 1
    logprobs: int | None = None
    adapter: str = ""


@dataclass(frozen=True)
class Event:
    """One token of a request. piece: token, text and number of the text it belongs to (row)."""

    piece: Piece
    logprobs: Logprobs | None = None


class Answers:
    """Stream of a request's tokens: `async for event in answers` gives an Event per token until all
    texts are complete. Raises RequestError. Its owner closes it. texts: number of texts. submitted:
    time of the request's submission. cancel: function that ends the incomplete texts."""

    def __init__(self, texts: int, submitted: float, cancel: Callable[[], None]) -> None:
        self._left, self._cancel = texts, cancel
        self._events: asyncio.Queue[Event | RequestError] = asyncio.Queue()
        self.queued = 0.0  # seconds from submission to the slot of the text that got one last
        self.submitted, self._begun, self._ended = submitted, float("inf"), 0.0

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> Event:
        if not self._left:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, RequestError):
            raise event
        self._left -= event.piece.finish is not None
        return event

    @property
    def times(self) -> Times | None:
        """Times of the request up to its newest token; None before the first token."""
        return Times(self.submitted, self._begun, self._ended) if self._ended else None

    def put(self, event: Event | RequestError) -> None:
        """Add a token or the error that ends the request; on the event loop."""
        self._events.put_nowait(event)

    def record_run(self, begun: float, ended: float) -> None:
        """Record a token's times. begun: its text got a slot. ended: its step ended."""
        self._begun, self._ended = min(self._begun, begun), ended

    def close(self) -> None:
        """Cancel the texts that are not complete."""
        self._cancel()
