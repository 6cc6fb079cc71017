"""Answers of models that continue texts, given again: to the same request (cache.py), and to a
question that is alike (semantic.py) where the server was told to. On the event loop.

Only what is repeatable is kept: greedy texts, and those with a seed of the client's; whole ones,
no part that a client left. The tokens are kept, so that a stream of them is a stream again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ...errors import InputError
from ..answers import Answers, Event
from ..http.openai_request import Question, TextRequest
from ..observe.text_metrics import TextMetrics
from ..scheduling.engine import HIT, MISS, Times
from ..text_model import TextModel
from . import pairs
from .cache import Cache, key_of
from .encoder import Encoder
from .false_hits import Terms, chosen
from .semantic import SemanticCache

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from ...bundle.bundle import Bundle

SEMANTIC = "semantic"  # beside HIT and MISS
NO_CACHE, NO_STORE = "no-cache", "no-store"  # of a request's cache-control, RFC 9111, 5.2.1
HEADER, SIMILARITY = "x-cache", "x-cache-similarity"
TOKENS, QUESTION = "tokens", "question"  # what a key is of


@dataclass(frozen=True)
class Semantic:
    """cache: of all models of the server. encoder: that says how alike two questions are."""

    cache: SemanticCache
    encoder: Encoder


def semantic(
    opened: Callable[[Path | None, ExitStack], Bundle],
    args: argparse.Namespace,
    stack: ExitStack,
    say: Callable[..., None],
) -> Semantic | None:
    """What the options of serve ask for; None where they do not. The encoder reads every text of
    the pairs. Raises InputError, and as `opened`."""
    needs = {
        "--semantic-cache-mib": args.semantic_cache_mib or None,
        "--semantic-encoder": args.semantic_encoder,
        "--semantic-pairs": args.semantic_pairs,
        "--semantic-false-hits": args.semantic_false_hits or None,
    }
    missing = [option for option, value in needs.items() if value is None]
    if len(missing) == len(needs):
        return None
    if missing or not args.semantic_confidence:
        raise InputError(
            f"{' and '.join(missing or ['--semantic-confidence'])} is missing or 0",
            where="serve",
            accepted=f"{', '.join(needs)} together, or none of them",
        )
    labelled = pairs.read(args.semantic_pairs)
    encoder = Encoder(opened(args.semantic_encoder, stack))
    stack.callback(encoder.close)
    vectors = {t: encoder.embedded(t) for p in labelled for t in (p.text, p.other)}
    whole = {text: vector for text, vector in vectors.items() if vector is not None}
    read = [pair for pair in labelled if pair.text in whole and pair.other in whole]
    terms = Terms(args.semantic_false_hits, args.semantic_confidence)
    limit = chosen(read, whole, terms, str(args.semantic_pairs))
    cut = len(labelled) - len(read)
    say(level="info", event="semantic_cache", pairs=len(read), cut=cut, **asdict(limit))
    cache = SemanticCache(args.semantic_cache_mib << 20, limit.entries, limit.threshold)
    return Semantic(cache, encoder)


class Replayed:
    """Tokens that were made before, as decoding.Answers gives those that are made."""

    queued = 0.0
    times: Times | None = None

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = iter(events)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            return next(self._events)
        except StopIteration:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Nothing is left to give up."""


class Recorded:
    """Tokens as they are made, kept when the last one has come. keep: takes all of them."""

    def __init__(self, answers: Answers, texts: int, keep: Callable[[list[Event]], None]) -> None:
        self._answers, self._left, self._keep = answers, texts, keep
        self._events = list[Event]()

    @property
    def queued(self) -> float:
        return self._answers.queued

    @property
    def times(self) -> Times | None:
        return self._answers.times

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._answers)
        self._events.append(event)
        if event.piece.finish is not None:
            self._left -= 1
            if not self._left:
                self._keep(self._events)
        return event

    def close(self) -> None:
        self._answers.close()


Events = Answers | Recorded | Replayed


@dataclass(frozen=True)
class Recall:
    """The caches of a server as one version of a model uses them. digest: of its bundle. exact,
    semantic: None for none."""

    digest: str
    exact: Cache | None
    semantic: Semantic | None
    model: TextModel
    metrics: TextMetrics

    async def answers(
        self, request: TextRequest, control: frozenset[str], begin: Callable[[], Answers]
    ) -> tuple[Events, dict[str, str]]:
        """The answers to a request, and the headers that say where they come from. control: words
        of its cache-control. begin: has them made. Raises as `begin`."""
        if not request.repeatable:
            return begin(), {}
        look, keeps = NO_CACHE not in control, list[Callable[[list[Event]], None]]()
        if self.exact is not None:
            exact, key = self.exact, self._key(request)
            before = exact.get(key) if look else None
            (self.metrics.misses if before is None else self.metrics.hits).add()
            if before is not None:
                return Replayed(before), {HEADER: HIT}
            keeps.append(lambda events: exact.put(key, events))
        if self.semantic is not None and request.question is not None:
            cache, question = self.semantic.cache, request.question
            vector = await self.semantic.encoder.vector(question.text)
            if vector is None:
                self.metrics.semantic_skipped.add()
            else:
                frame = await asyncio.to_thread(self._frame, question)
                nearest = vector
                alike = cache.get(frame, vector) if look else None
                misses, hits = self.metrics.semantic_misses, self.metrics.semantic_hits
                (misses if alike is None else hits).add()
                if alike is not None:
                    return Replayed(alike[0]), {HEADER: SEMANTIC, SIMILARITY: f"{alike[1]:.4f}"}
                keeps.append(lambda events: cache.put(self.digest, frame, nearest, events))

        def keep(events: list[Event]) -> None:
            for one in keeps if NO_STORE not in control else []:
                one(events)

        texts = len(request.prompts.rows) * request.prompts.n
        return Recorded(begin(), texts, keep), {HEADER: MISS}

    def _key(self, request: TextRequest) -> bytes:
        """Of all that its tokens follow from."""
        prompts = request.prompts
        parts = [prompts.rows, prompts.n, prompts.logprobs, asdict(prompts.rules.options)]
        text = json.dumps([*parts, request.schema], sort_keys=True)
        return key_of(self.digest, self.model.target, [], None, TOKENS + text)

    def _frame(self, question: Question) -> bytes:
        """Of all that was asked but the question, and of what the chat template says beside it: the
        date, perhaps."""
        ids = self.model.prompts([question.blank]) if question.blank else []
        text = json.dumps([question.around, ids], sort_keys=True)
        return key_of(self.digest, self.model.target, [], None, QUESTION + text)
