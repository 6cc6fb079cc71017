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
    """Tokenized prompts of a generation request, with the rules of generation.

    rows: token ids of each prompt
    rules: sampling rules
    n: number of texts per prompt; texts are numbered prompt by prompt
    logprobs: number of likeliest tokens reported with each token; None: no log probabilities
    adapter: name of the LoRA adapter to use; "" for the model itself
    """

    rows: Sequence[Sequence[int]]
    rules: Rules
    n: int = 1
    logprobs: int | None = None
    adapter: str = ""


@dataclass(frozen=True)
class Event:
    """A generated token, sent to a server's client.

    piece: token, the text that it adds, and the number of the text that it belongs to (`row`)
    logprobs: log probabilities; None if not requested
    """

    piece: Piece
    logprobs: Logprobs | None = None


class TokenStream:
    """Stream of the tokens that a server generates for a request.

    `async for event in answers` yields an Event per token until all texts are complete, and raises
    RequestError if the request fails. The caller closes it.

    texts: number of texts
    submitted: time of the request's submission, in seconds
    cancel: function that ends the incomplete texts
    """

    def __init__(self, texts: int, submitted: float, cancel: Callable[[], None]) -> None:
        self._left, self._cancel = texts, cancel
        self._events: asyncio.Queue[Event | RequestError] = asyncio.Queue()
        self.queued = 0.0  # seconds from submission to the slot of the text that got one last
        self.submitted, self._begun, self._ended = submitted, float("inf"), 0.0

    def __aiter__(self) -> TokenStream:
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
        """Return the times of the request up to its newest token; None before the first token."""
        return Times(self.submitted, self._begun, self._ended) if self._ended else None

    def put(self, event: Event | RequestError) -> None:
        """Add a token for the client, or the error that ends the request. Called on the event
        loop."""
        self._events.put_nowait(event)

    def record_run(self, begun: float, ended: float) -> None:
        """Record the times of a request's token, in seconds.

        begun: time at which its text got a slot
        ended: time at which its decode step ended
        """
        self._begun, self._ended = min(self._begun, begun), ended

    def close(self) -> None:
        """Cancel the texts of the request that are not complete, because nobody reads them any
        more."""
        self._cancel()
