"""Cache of generated texts: exact (cache.py), and by similar questions (semantic.py) if enabled.

Only repeatable texts are stored: greedy ones, and those with a seed of the client; complete ones
only. Entries are token events, so that a cached answer can be streamed. Runs on the event loop;
called by http/openai_texts.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ...errors import InputError
from ..answers import Event, TokenStream
from ..http.openai_request import Question, TextRequest
from ..observe.metrics import TextMetrics
from ..request import HIT, MISS, Times
from ..text_model import TextModel
from . import pairs
from .cache import Cache, cache_key
from .encoder import QuestionEncoder
from .false_hits import FalseHitLimit, choose_threshold
from .semantic import SemanticCache

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from ...bundle.bundle import Bundle

SEMANTIC = "semantic"  # third value of HEADER, with HIT and MISS
NO_CACHE, NO_STORE = "no-cache", "no-store"  # directives of cache-control, RFC 9111, 5.2.1
HEADER, SIMILARITY = "x-cache", "x-cache-similarity"
TOKENS, QUESTION = "tokens", "question"  # prefixes of keys


@dataclass(frozen=True)
class SemanticLookup:
    """Semantic cache and the encoder of its questions, shared by all models of a server."""

    cache: SemanticCache
    encoder: QuestionEncoder


def open_semantic_cache(
    open_bundle: Callable[[Path | None, ExitStack], Bundle],
    args: argparse.Namespace,
    stack: ExitStack,
    say: Callable[..., None],
) -> SemanticLookup | None:
    """Open the semantic cache that the options of `serve` describe; None without these options.

    open_bundle: function that opens the encoder's bundle
    args: options of `serve`
    stack: closes the encoder at its end
    say: function that logs one line

    Pairs with a text that the encoder cannot read whole are left out, and their number is logged.
    Raises InputError, and the errors of `open_bundle`.
    """
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
    encoder = QuestionEncoder(open_bundle(args.semantic_encoder, stack))
    stack.callback(encoder.close)
    vectors = {t: encoder.embed(t) for p in labelled for t in (p.text, p.other)}
    whole = {text: vector for text, vector in vectors.items() if vector is not None}
    read = [pair for pair in labelled if pair.text in whole and pair.other in whole]
    terms = FalseHitLimit(args.semantic_false_hits, args.semantic_confidence)
    limit = choose_threshold(read, whole, terms, str(args.semantic_pairs))
    cut = len(labelled) - len(read)
    say(level="info", event="semantic_cache", pairs=len(read), cut=cut, **asdict(limit))
    cache = SemanticCache(args.semantic_cache_mib << 20, limit.entries, limit.threshold)
    return SemanticLookup(cache, encoder)


class ReplayedStream:
    """Stream of a server's cached answer, its tokens, with the interface of TokenStream."""

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
        """Do nothing, because no text is being generated."""


class RecordingStream:
    """Stream that passes the server's new tokens on and records them for the cache.

    answers: stream of the tokens
    texts: number of texts
    keep: function that receives all events once every text is complete
    """

    def __init__(
        self, answers: TokenStream, texts: int, keep: Callable[[list[Event]], None]
    ) -> None:
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


Events = TokenStream | RecordingStream | ReplayedStream


@dataclass(frozen=True)
class CompletionCache:
    """Exact and semantic cache of answers of one version of a model; each is None if disabled.

    digest: digest of the version's bundle
    """

    digest: str
    exact: Cache | None
    semantic: SemanticLookup | None
    model: TextModel
    metrics: TextMetrics

    async def answers(
        self, request: TextRequest, control: frozenset[str], begin: Callable[[], TokenStream]
    ) -> tuple[Events, dict[str, str]]:
        """Answer a server's request from a cache, else by starting its generation.

        control: directives of the request's cache-control header
        begin: function that starts the generation

        Returns (stream of its tokens, response headers).
        """
        if not request.repeatable:
            return begin(), {}
        look, keeps = NO_CACHE not in control, list[Callable[[list[Event]], None]]()
        if self.exact is not None:
            exact, key = self.exact, self._key(request)
            before = exact.get(key) if look else None
            (self.metrics.misses if before is None else self.metrics.hits).add()
            if before is not None:
                return ReplayedStream(before), {HEADER: HIT}
            keeps.append(lambda events: exact.put(key, events))
        if self.semantic is not None and request.question is not None:
            cache, question = self.semantic.cache, request.question
            vector = await self.semantic.encoder.vector(question.text)
            if vector is None:
                self.metrics.semantic_skipped.add()
            else:
                frame = await asyncio.to_thread(self._frame, question, request.prompts.adapter)
                nearest = vector
                alike = cache.get(frame, vector) if look else None
                misses, hits = self.metrics.semantic_misses, self.metrics.semantic_hits
                (misses if alike is None else hits).add()
                if alike is not None:
                    return ReplayedStream(alike[0]), {
                        HEADER: SEMANTIC,
                        SIMILARITY: f"{alike[1]:.4f}",
                    }
                keeps.append(lambda events: cache.put(self.digest, frame, nearest, events))

        def keep(events: list[Event]) -> None:
            for one in keeps if NO_STORE not in control else []:
                one(events)

        texts = len(request.prompts.rows) * request.prompts.n
        return RecordingStream(begin(), texts, keep), {HEADER: MISS}

    def _key(self, request: TextRequest) -> bytes:
        """Hash, for the server's cache, everything that determines the tokens of an answer."""
        prompts = request.prompts
        parts = [prompts.rows, prompts.n, prompts.logprobs, prompts.adapter]
        parts.append(asdict(prompts.rules.options))
        text = json.dumps([*parts, request.schema], sort_keys=True)
        return cache_key(self.digest, self.model.target, [], None, TOKENS + text)

    def _frame(self, question: Question, adapter: str) -> bytes:
        """Hash, for the semantic cache, everything in a request but its question.

        That includes other fields, the adapter, and text that the chat template adds, such as a
        date.
        """
        ids = self.model.prompts([question.blank]) if question.blank else []
        text = json.dumps([question.around, ids, adapter], sort_keys=True)
        return cache_key(self.digest, self.model.target, [], None, QUESTION + text)
