"""Engine of text generation: the model's thread, and the requests that wait on the event loop.

Each text of a request is a TextJob; SlotScheduler decides which prompt piece or decode step runs
next. Tokens come back as events of a TokenStream. Called by inference.py, http/ and grpc/.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from ...errors import AnswerError
from ...generate import Completion, Options, Piece
from ...generate.grammar import SchemaError
from ...generate.logprobs import logprobs
from ...generate.prompt_lookup import LEAST, Guesses, score_in_pairs, verify_step
from ...generate.row import RowState
from ...inputs.batch import Array
from ...process.niceness import give_way
from ...tasks.text_generation import NO_PAIRS
from ..answers import Event, Prompts, TokenStream
from ..model import client_failure
from ..observe.metrics import TextMetrics
from ..refusals import DeadlineError, ModelError, RequestError, UnknownError
from ..request import Request, Result
from ..text_model import TextModel
from ..warm_up.sharing import ALONE, EQUAL
from ..worker_threads import WorkerThreads
from .engine import RECHECK, client_refusal
from .fair_queue import Refused
from .prefix_cache import PrefixCache
from .slots import GenerationJob, ScheduledStep, SlotScheduler

ADAPTER = "adapter"
OPTIONS = frozenset(f.name for f in fields(Options))
"""Parameters of a request that are options of generation."""


@dataclass(eq=False)
class TextJob(GenerationJob):
    """Job of a server's Decoding: one text to generate for a request.

    row: sampler of its tokens
    logprobs: number of alternatives reported per token; None: no logprobs
    adapter: name of the adapter that answers; "" for the model itself
    begun: time at which the text got its slot
    last, sampled: newest token, and its time; 0 before the first token
    guesses: prompt lookup; None before the first token, and where nothing is guessed
    """

    ids: Sequence[int]
    row: RowState
    answers: TokenStream
    slot: int
    logprobs: int | None
    adapter: str
    has_slot: bool = False
    begun: float = 0.0
    last: int = 0
    sampled: float = 0.0
    guesses: Guesses | None = None


class Decoding:
    """A server's scheduler and thread of text generation with one model. Made on the event loop.

    prefixes: cache of prompt prefixes; None: no cache
    niceness: see process/niceness.py
    guessed: {tokens of one text's step: seconds} for prompt lookup (generate/prompt_lookup.py),
        with which each text runs alone; empty or None: no prompt lookup
    """

    def __init__(
        self,
        model: TextModel,
        scheduler: SlotScheduler[TextJob],
        metrics: TextMetrics,
        say: Callable[..., None],
        prefixes: PrefixCache | None = None,
        niceness: int = 0,
        guessed: Mapping[int, float] | None = None,
    ) -> None:
        self.model, self.metrics, self.clock = model, metrics, time.monotonic
        self._scheduler, self._say = scheduler, say
        self._niceness, self._guess_seconds = niceness, guessed or {}
        self._prefixes = prefixes
        if prefixes is not None:
            scheduler.cached = lambda text: prefixes.length(text.ids, text.adapter)
        self._loop = asyncio.get_running_loop()
        self.worker_threads = WorkerThreads()
        self._ready = threading.Condition()
        self._numbers = count()
        self._shared = self._larger = 0  # steps of several texts; steps of more than two tokens
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def draining(self) -> bool:
        return self._scheduler.draining

    @property
    def waiting(self) -> int:
        """Return the number of a server's texts that wait or run."""
        return len(self._scheduler)

    def admit(self, client: str) -> None:
        """Raise RequestError if every request of this client would be refused now."""
        try:
            with self._ready:
                self._scheduler.check(client)
        except Refused as e:
            raise client_refusal(e) from None

    def begin(self, prompts: Prompts, request: Request) -> TokenStream:
        """Submit a request; return the stream of its tokens, which the caller closes.

        Raises RequestError.
        """
        now, texts = self.clock(), list[TextJob]()
        answers = TokenStream(len(prompts.rows) * prompts.n, now, lambda: self.abort(texts))
        for i, ids in enumerate(prompts.rows):
            for j in range(prompts.n):
                row = RowState.start(prompts.rules, ids, i * prompts.n + j, i * prompts.n + j)
                text = TextJob(
                    len(ids),
                    row.room,
                    ids,
                    row,
                    answers,
                    next(self._numbers),
                    prompts.logprobs,
                    prompts.adapter,
                    client=request.client,
                    priority=request.priority,
                    first=request.deadline,
                    deadline=request.last,
                )
                texts.append(text)
        with self._ready:
            try:
                self._scheduler.submit(now, texts)
            except Refused as e:
                raise client_refusal(e) from None
            self._ready.notify()
        self._set_gauges()
        self.metrics.prompt_tokens.add(sum(len(text.ids) for text in texts))
        return answers

    async def complete(
        self, prompts: Prompts, request: Request
    ) -> tuple[list[Completion], TokenStream]:
        """Generate all texts of a request: (their completions in order, the closed stream).

        Raises RequestError.
        """
        answers = self.begin(prompts, request)
        number = len(prompts.rows) * prompts.n
        pieces: list[list[Piece]] = [[] for _ in range(number)]
        try:
            async for event in answers:
                pieces[event.piece.row].append(event.piece)
        finally:
            answers.close()
        lengths = [len(ids) for ids in prompts.rows for _ in range(prompts.n)]
        return [join_completion(p, n) for p, n in zip(pieces, lengths, strict=True)], answers

    async def answer(
        self,
        texts: Sequence[Any],
        pairs: Sequence[Any] | None,
        request: Request,
        parameters: Mapping[str, Any] | None = None,
    ) -> Result:
        """Generate a text for each prompt: a Result with the answers of `predict`, in order.

        parameters: parameters of the request; adapter and generation options are used, others
            ignored

        Raises RequestError.
        """
        prompts = await self.prompts(texts, pairs, parameters, request.client)
        completions, answers = await self.complete(prompts, request)
        tokens = sum(c.prompt_tokens + len(c.tokens) for c in completions)
        times, documents = answers.times, [c.to_json() for c in completions]
        return Result(
            documents,
            0,
            tokens,
            answers.queued,
            times.model if times else 0.0,
            times,
            rows=len(documents),
            lengths=tuple(c.prompt_tokens for c in completions),
        )

    async def prompts(
        self, texts: Sequence[Any], pairs: Any, parameters: Mapping[str, Any] | None, client: str
    ) -> Prompts:
        """Tokenize a request's prompts off the event loop; see `answer`. Raises RequestError."""
        if pairs is not None:
            raise RequestError(NO_PAIRS)
        chosen = parameters or {}
        adapter = self.model.adapter(chosen.get(ADAPTER, self.model.name), ADAPTER)
        options = {n: v for n, v in chosen.items() if n in OPTIONS}
        rows, rules = await self.worker_threads.run(
            client, partial(self.model.read, texts, options)
        )
        return Prompts(rows, rules, adapter=adapter)

    async def infer(self, arrays: Mapping[str, Any], request: Request) -> Result:  # noqa: ARG002
        """Refuse raw tensors: raise UnknownError, because a text's KV cache stays on the server."""
        raise UnknownError("raw tensors are not supported for text-generation")

    def abort(self, texts: Sequence[TextJob]) -> None:
        """End the generation of texts that are not complete, because their client has left."""
        with self._ready:
            for text in texts:
                self._scheduler.abort(text)
            self._ready.notify()
        self._set_gauges()

    def drain(self) -> None:
        """Refuse new requests, because the server ends."""
        with self._ready:
            self._scheduler.drain()
            self._ready.notify()

    async def wait_until_drained(self) -> None:
        """Wait until all accepted requests are answered, and end the thread."""
        self.drain()
        await asyncio.to_thread(self._thread.join)

    def _set_gauges(self) -> None:
        self.metrics.pending.set(len(self._scheduler.waiting))
        self.metrics.waiting.set(len(self._scheduler.waiting))
        self.metrics.running.set(self._scheduler.active)

    def _work(self) -> None:
        """Run the model's thread: choose a step, run it, hand out its tokens, until the server has
        drained."""
        give_way(self._niceness)
        while True:
            with self._ready:
                step = self._scheduler.schedule(self.clock())
                while not (step.jobs or step.expired or step.aborted):
                    if self._scheduler.draining and not len(self._scheduler):
                        return
                    self._ready.wait()
                    step = self._scheduler.schedule(self.clock())
            start = self.clock()
            late = DeadlineError("the request was not answered before its timeout", retry_after=1.0)
            events: list[tuple[TextJob, Event | RequestError]]
            events = [(text, late) for text in step.expired]
            self._free([*step.expired, *step.aborted])
            events += self._run(step)
            finished = [text for text, event in events if _is_last(event)]
            self._free(finished)
            with self._ready:
                self._scheduler.postprocess([t for t in finished if t not in step.expired])
            span = (start, self.clock())
            self._loop.call_soon_threadsafe(self._deliver, events, len(step.decode), span)

    def _free(self, texts: Sequence[TextJob]) -> None:
        """Free the server's slots, in the KV cache, of those texts that have one."""
        for text in texts:
            if text.has_slot:
                self.model.slots.close(text.slot)
                text.has_slot = False

    def _run(self, step: ScheduledStep[TextJob]) -> list[tuple[TextJob, Event | RequestError]]:
        """Run what the server has scheduled, a prompt piece or a decode step; return (text, its new
        token or error) of each text."""
        texts = step.jobs
        if not texts:
            return []
        if self._guess_seconds and not step.prefill:
            return [(text, event) for text in texts for event in self._run_guesses(text)]
        try:
            if step.prefill:
                scores = self._prefill(*step.prefill)
            else:
                scores = self._decode({text.slot: text.last for text in texts})
        except Exception as e:  # any failure of a runtime ends these texts and no other
            self._tell(level="error", event="model_failed", error=type(e).__name__)
            return [(text, client_failure(e)) for text in texts]
        return [
            (text, self._sample(text, scores[text.slot])) for text in texts if text.slot in scores
        ]

    def _prefill(self, text: TextJob, start: int, stop: int) -> dict[int, Array]:
        """Run the model on tokens start..stop of a request's prompt.

        Returns {slot: scores of the first new token} after the last piece of the prompt, else {}.
        """
        if not text.has_slot:
            self.model.slots.open(text.slot, text.adapter)
            text.has_slot, text.begun = True, self.clock()
            if self._prefixes is not None:
                self._prefixes.restore(text.slot, text.ids, start, text.adapter)
                self._loop.call_soon_threadsafe(self.metrics.prefix_hits.add, start)
                self._loop.call_soon_threadsafe(self.metrics.prefix_queries.add, len(text.ids))
        scores = self.model.slots.read(text.slot, text.ids[start:stop])
        if self._prefixes is not None:
            self._prefixes.keep(text.slot, text.ids, start, stop, text.adapter)
        return {text.slot: scores} if stop == len(text.ids) else {}

    def _sample(self, text: TextJob, scores: Array) -> Event | RequestError:
        try:
            piece = text.row.add(scores)
        except AnswerError as e:
            kind = RequestError if isinstance(e, SchemaError) else ModelError
            return kind(f"{e.where}: {e.problem}")
        text.last = piece.token
        if self._guess_seconds and text.guesses is None:
            text.guesses = Guesses([*text.ids, piece.token], self._guess_seconds)
        if text.logprobs is None:
            return Event(piece)
        return Event(piece, logprobs(scores, piece.token, text.logprobs))

    def _run_guesses(self, text: TextJob) -> list[Event | RequestError]:
        """Run one step of a request's text with guessed tokens; returns an event per new token."""
        guesses = text.guesses
        assert guesses is not None

        def choose(scores: Array) -> tuple[Event | RequestError, int | None]:
            event = self._sample(text, scores)
            return event, None if _is_last(event) else text.last

        guessed, right = guesses.guessed, guesses.right
        try:
            scored = partial(self._score_step, text.slot)
            undo = partial(self.model.slots.undo, text.slot)
            events = verify_step(guesses, text.row.room, scored, undo, choose)
        except Exception as e:  # any failure of a runtime ends this text and no other
            self._tell(level="error", event="model_failed", error=type(e).__name__)
            return [client_failure(e)]
        counts = guesses.guessed - guessed, guesses.right - right
        self._loop.call_soon_threadsafe(self.metrics.count_guesses, *counts)
        return events

    def _score_step(self, number: int, step: Sequence[int]) -> Array:
        """Return the scores after each token of one step of the text in slot `number`.

        Some larger steps (`_is_rechecked`) are run again in steps of two tokens, whose scores are
        returned. If a score differs, although warm-up found no difference, later steps have two
        tokens.
        """
        slots = self.model.slots
        scores = slots.scores(number, step)
        if len(step) == LEAST:
            return scores
        self._larger += 1
        if not _is_rechecked(self._larger):
            return scores
        slots.undo(number, len(step))
        expected = score_in_pairs(partial(slots.scores, number), step)
        self._loop.call_soon_threadsafe(self.metrics.rechecked.add)
        if not np.array_equal(scores, expected, equal_nan=True):
            self._guess_seconds = {LEAST: self._guess_seconds[LEAST]}
            with self._ready:
                texts = list(self._scheduler.running)
            for guesses in (text.guesses for text in texts if text.guesses is not None):
                guesses.seconds = self._guess_seconds
            self._loop.call_soon_threadsafe(self.metrics.unequal.add)
            self._tell(level="error", event="guesses_change_answers", tokens=len(step))
        return expected

    def _decode(self, tokens: Mapping[int, int]) -> dict[int, Array]:
        """Decode one token of each request's text: {slot: newest token} -> {slot: scores of the
        next token}.

        Some shared steps (`_is_rechecked`) are run again with each text alone, whose scores are
        returned. If a score differs, although warm-up found no difference, each text runs alone
        from then on.
        """
        slots = self.model.slots
        if self.model.sharing == ALONE:
            return {n: slots.step({n: token})[n] for n, token in tokens.items()}
        scores = slots.step(tokens)
        if len(tokens) == 1 or self.model.sharing != EQUAL:
            return scores
        self._shared += 1
        if not _is_rechecked(self._shared):
            return scores
        alone = dict[int, Array]()
        for number, token in tokens.items():
            slots.undo(number)
            alone |= slots.step({number: token})
        self._loop.call_soon_threadsafe(self.metrics.rechecked.add)
        if any(not np.array_equal(scores[n], alone[n], equal_nan=True) for n in tokens):
            self.model.sharing = ALONE
            self._loop.call_soon_threadsafe(self.metrics.unequal.add)
            self._tell(level="error", event="batches_change_answers", rows=len(tokens))
        return alone

    def _deliver(
        self,
        outcomes: Sequence[tuple[TextJob, Event | RequestError]],
        rows: int,
        span: tuple[float, float],
    ) -> None:
        """Hand a step's tokens to the requests that wait for them, and count them. Runs on the
        event loop."""
        start, end = span
        for text, event in outcomes:
            text.answers.put(event)
            if isinstance(event, Event):
                if text.sampled:
                    self.metrics.next_token.observe(end - text.sampled)
                else:
                    self.metrics.first_token.observe(end - text.arrived)
                    queued = text.begun - text.arrived
                    self.metrics.queue.observe(queued)
                    self.metrics.queue_us.add(1e6 * queued)
                    text.answers.queued = max(text.answers.queued, queued)
                text.sampled = end
                text.answers.record_run(text.begun, end)
                self.metrics.tokens.add()
        if rows:
            self.metrics.batches.add()
            self.metrics.rows.add(rows)
            self.metrics.batch_rows.observe(rows)
        self.metrics.model_us.add(1e6 * (end - start))
        self.metrics.predict.observe(end - start)
        self.metrics.statistics[self.model.name].record_run(rows or 1, end - start)
        self._set_gauges()

    def _tell(self, **fields: Any) -> None:
        self._loop.call_soon_threadsafe(lambda: self._say(**fields))


def _is_rechecked(number: int) -> bool:
    """Return True if the server verifies step `number`: 1, 2, 4, 8 ... and every multiple of
    RECHECK."""
    return number % RECHECK == 0 or number & (number - 1) == 0


def _is_last(event: Event | RequestError) -> bool:
    return isinstance(event, RequestError) or event.piece.finish is not None


def join_completion(pieces: Sequence[Piece], prompt: int) -> Completion:
    """Join the pieces of a request's text to its Completion.

    prompt: number of tokens of its prompt
    """
    text, tokens = "".join(p.text for p in pieces), tuple(p.token for p in pieces)
    return Completion(text, tokens, str(pieces[-1].finish), prompt, pieces[-1].stop)
