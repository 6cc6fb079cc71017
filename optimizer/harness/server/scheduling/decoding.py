"""The thread in which texts are continued, and the requests that wait on the event loop."""

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
from ...generate.row import Row
from ...inputs.batch import Array
from ...process.niceness import give_way
from ...tasks.text_generation import NO_PAIRS
from ..answers import Answers, Event, Prompts
from ..beside import Beside
from ..model import failure
from ..observe.text_metrics import TextMetrics
from ..refusals import DeadlineError, ModelError, RequestError, UnknownError
from ..text_model import TextModel
from ..warm_up.exactness import ALONE, EQUAL
from .batching import Refused
from .engine import RECHECK, Call, Result, refusal
from .prefixes import Prefixes
from .slots import Job, Scheduler, Turn

OPTIONS = frozenset(f.name for f in fields(Options))  # of a request's parameters, those that count


@dataclass(eq=False)
class _Text:
    """A text while it waits or runs. number: in the slots. last: its newest token."""

    job: Job
    ids: Sequence[int]
    row: Row
    answers: Answers
    number: int
    submitted: float
    logprobs: int | None
    opened: bool = False
    begun: float = 0.0  # when it had its slot
    last: int = 0
    guesses: Guesses | None = None  # None: before its first token, and where none are guessed
    newest: float = 0.0  # when that was sampled


class Decoding:
    """Continues texts with one model, in a thread of its own. Made on the event loop.

    say: receives what happened, as fields of a log line. prefixes: of prompts; None: none is kept.
    niceness: of the thread, see process/niceness.py. guessed: {tokens of a step of one text:
    seconds}, some of them guessed (generate/prompt_lookup.py), where model.sharing is "alone";
    empty: none.
    """

    def __init__(
        self,
        model: TextModel,
        scheduler: Scheduler,
        metrics: TextMetrics,
        say: Callable[..., None],
        prefixes: Prefixes | None = None,
        niceness: int = 0,
        clock: Callable[[], float] = time.monotonic,
        guessed: Mapping[int, float] | None = None,
    ) -> None:
        self.model, self.metrics, self.clock = model, metrics, clock
        self._scheduler, self._say = scheduler, say
        self._niceness, self._guess_seconds = niceness, guessed or {}
        self._prefixes = prefixes
        if prefixes is not None:
            scheduler.kept = lambda job: prefixes.length(self._texts[job].ids)
        self._loop = asyncio.get_running_loop()
        self.beside = Beside()
        self._texts: dict[Job, _Text] = {}
        self._ready = threading.Condition()
        self._numbers = count()
        self._shared = self._larger = 0  # steps of several texts, of more than two tokens of one
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def draining(self) -> bool:
        return self._scheduler.draining

    @property
    def waiting(self) -> int:
        """Texts that wait or run."""
        return len(self._scheduler)

    def admit(self, client: str) -> None:
        """Raises RequestError where a request of this client would be refused whatever it holds."""
        try:
            with self._ready:
                self._scheduler.check(self.clock(), client)
        except Refused as e:
            raise refusal(e) from None

    def begin(self, prompts: Prompts, call: Call) -> Answers:
        """The answers to a request, to be closed. Raises RequestError where it is refused."""
        now, texts = self.clock(), list[_Text]()
        answers = Answers(len(prompts.rows) * prompts.n, now, self.cancel)
        for i, ids in enumerate(prompts.rows):
            for j in range(prompts.n):
                row = Row.start(prompts.rules, ids, i * prompts.n + j, i * prompts.n + j)
                job = Job(len(ids), row.room, call.client, call.priority, call.deadline, call.last)
                answers.jobs.append(job)
                text = _Text(job, ids, row, answers, next(self._numbers), now, prompts.logprobs)
                texts.append(text)
        with self._ready:
            try:
                self._scheduler.submit(now, answers.jobs)
            except Refused as e:
                raise refusal(e) from None
            self._texts |= {text.job: text for text in texts}
            self._ready.notify()
        self._gauges()
        self.metrics.prompt_tokens.add(sum(len(text.ids) for text in texts))
        return answers

    async def complete(self, prompts: Prompts, call: Call) -> tuple[list[Completion], Answers]:
        """The whole texts of a request, in order. Raises RequestError."""
        answers = self.begin(prompts, call)
        number = len(prompts.rows) * prompts.n
        pieces: list[list[Piece]] = [[] for _ in range(number)]
        try:
            async for event in answers:
                pieces[event.piece.row].append(event.piece)
        finally:
            answers.close()
        lengths = [len(ids) for ids in prompts.rows for _ in range(prompts.n)]
        return [completion(p, n) for p, n in zip(pieces, lengths, strict=True)], answers

    async def answer(
        self,
        texts: Sequence[Any],
        pairs: Sequence[Any] | None,
        call: Call,
        parameters: Mapping[str, Any] | None = None,
    ) -> Result:
        """What `predict` gives for each text, in order. parameters: of the request; those that are
        options of a generation count. Raises RequestError."""
        prompts = await self.prompts(texts, pairs, parameters, call.client)
        completions, answers = await self.complete(prompts, call)
        tokens = sum(c.prompt_tokens + len(c.tokens) for c in completions)
        times, documents = answers.times, [c.to_json() for c in completions]
        return Result(documents, 0, tokens, answers.queued, times.model if times else 0.0, times)

    async def prompts(
        self, texts: Sequence[Any], pairs: Any, parameters: Mapping[str, Any] | None, client: str
    ) -> Prompts:
        """Read a request's prompts beside the event loop; see `answer`. Raises RequestError."""
        if pairs is not None:
            raise RequestError(NO_PAIRS)
        options = {n: v for n, v in (parameters or {}).items() if n in OPTIONS}
        return Prompts(*await self.beside.run(client, partial(self.model.read, texts, options)))

    async def infer(self, arrays: Mapping[str, Any], call: Call) -> Result:  # noqa: ARG002
        """Not of a model whose cache stays here. Raises UnknownError."""
        raise UnknownError("a model that continues texts takes no tensors")

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Give up the texts of these jobs that are not complete."""
        with self._ready:
            for job in jobs:
                if self._scheduler.cancel(job):
                    self._texts.pop(job, None)
            self._ready.notify()
        self._gauges()

    def drain(self) -> None:
        """Accept nothing more."""
        with self._ready:
            self._scheduler.drain()
            self._ready.notify()

    async def drained(self) -> None:
        """Wait until everything accepted is answered, and end the thread."""
        self.drain()
        await asyncio.to_thread(self._thread.join)

    def _gauges(self) -> None:
        self.metrics.pending.set(self._scheduler.waiting)
        self.metrics.waiting.set(self._scheduler.waiting)
        self.metrics.running.set(self._scheduler.active)

    def _work(self) -> None:
        """The model's thread: take, run, deliver, until drained."""
        give_way(self._niceness)
        while True:
            with self._ready:
                turn = self._scheduler.take(self.clock())
                while not (turn.read or turn.step or turn.expired or turn.left):
                    if self._scheduler.draining and not len(self._scheduler):
                        return
                    self._ready.wait()
                    turn = self._scheduler.take(self.clock())
                named = [
                    *turn.step,
                    *turn.expired,
                    *turn.left,
                    *([turn.read[0]] if turn.read else []),
                ]
                texts = {job: self._texts[job] for job in named}
            start = self.clock()
            late = DeadlineError("it was not answered within the request's time", retry_after=1.0)
            self._end([texts[job] for job in (*turn.expired, *turn.left)])
            outcomes: list[tuple[_Text, Event | RequestError]] = [
                (texts[job], late) for job in turn.expired
            ]
            outcomes += self._run(turn, texts)
            ended = [text for text, event in outcomes if _is_last(event)]
            finished = [text.job for text in ended if text.job not in turn.expired]
            self._end([text for text in ended if text.opened])
            with self._ready:
                self._scheduler.finish(finished)
                for text in (*ended, *(texts[job] for job in turn.left)):
                    self._texts.pop(text.job, None)
            span = (start, self.clock())
            self._loop.call_soon_threadsafe(self._deliver, outcomes, len(turn.step), span)

    def _end(self, texts: Sequence[_Text]) -> None:
        for text in texts:
            if text.opened:
                self.model.slots.close(text.number)
                text.opened = False

    def _run(
        self, turn: Turn, texts: Mapping[Job, _Text]
    ) -> list[tuple[_Text, Event | RequestError]]:
        """The events of one piece of a prompt, or of one step."""
        involved = [texts[job] for job in turn.run]
        if not involved:
            return []
        if self._guess_seconds and not turn.read:
            return [(text, event) for text in involved for event in self._guessed(text)]
        try:
            if turn.read:
                scores = self._read(involved[0], *turn.read[1:])
            else:
                scores = self._step({text.number: text.last for text in involved})
        except Exception as e:  # whatever a runtime raises ends these texts and no other
            self._tell(level="error", event="model_failed", error=type(e).__name__)
            return [(text, failure(e)) for text in involved]
        sampled = [text for text in involved if text.number in scores]
        return [(text, self._sampled(text, scores[text.number])) for text in sampled]

    def _read(self, text: _Text, start: int, stop: int) -> dict[int, Array]:
        """Scores after the prompt, once all of it is read."""
        if not text.opened:
            self.model.slots.open(text.number)
            text.opened, text.begun = True, self.clock()
            if self._prefixes is not None:
                self._prefixes.restore(text.number, text.ids, start)
                self._loop.call_soon_threadsafe(self.metrics.prefix_hits.add, start)
                self._loop.call_soon_threadsafe(self.metrics.prefix_queries.add, len(text.ids))
        scores = self.model.slots.read(text.number, text.ids[start:stop])
        if self._prefixes is not None:
            self._prefixes.keep(text.number, text.ids, start, stop)
        return {text.number: scores} if stop == len(text.ids) else {}

    def _sampled(self, text: _Text, scores: Array) -> Event | RequestError:
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

    def _guessed(self, text: _Text) -> list[Event | RequestError]:
        """The tokens that a text chooses by the scores of one step of guesses."""
        guesses = text.guesses
        assert guesses is not None

        def choose(scores: Array) -> tuple[Event | RequestError, int | None]:
            event = self._sampled(text, scores)
            return event, None if _is_last(event) else text.last

        guessed, right = guesses.guessed, guesses.right
        try:
            scored = partial(self._scored, text.number)
            undo = partial(self.model.slots.undo, text.number)
            events = verify_step(guesses, text.row.room, scored, undo, choose)
        except Exception as e:  # whatever a runtime raises ends this text and no other
            self._tell(level="error", event="model_failed", error=type(e).__name__)
            return [failure(e)]
        counts = guesses.guessed - guessed, guesses.right - right
        self._loop.call_soon_threadsafe(self.metrics.count_guesses, *counts)
        return events

    def _scored(self, number: int, step: Sequence[int]) -> Array:
        """Scores of one step of a text. Now and then it is run in steps of two as well: where
        larger ones were found to change nothing at the start and do, those of two count, and from
        then on no larger one is taken."""
        slots = self.model.slots
        scores = slots.scores(number, step)
        if len(step) == LEAST:
            return scores
        self._larger += 1
        if not _due(self._larger):
            return scores
        slots.undo(number, len(step))
        expected = score_in_pairs(partial(slots.scores, number), step)
        self._loop.call_soon_threadsafe(self.metrics.rechecked.add)
        if not np.array_equal(scores, expected, equal_nan=True):
            self._guess_seconds = {LEAST: self._guess_seconds[LEAST]}
            with self._ready:
                texts = list(self._texts.values())
            for guesses in (text.guesses for text in texts if text.guesses is not None):
                guesses.seconds = self._guess_seconds
            self._loop.call_soon_threadsafe(self.metrics.unequal.add)
            self._tell(level="error", event="guesses_change_answers", tokens=len(step))
        return expected

    def _step(self, tokens: Mapping[int, int]) -> dict[int, Array]:
        """One token of each text. Now and then each is run alone as well: where texts together were
        found to change nothing at the start and do, those alone count, and from then on each text
        is run by itself."""
        slots = self.model.slots
        if self.model.sharing == ALONE:
            return {n: slots.step({n: token})[n] for n, token in tokens.items()}
        scores = slots.step(tokens)
        if len(tokens) == 1 or self.model.sharing != EQUAL:
            return scores
        self._shared += 1
        if not _due(self._shared):
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
        outcomes: Sequence[tuple[_Text, Event | RequestError]],
        rows: int,
        span: tuple[float, float],
    ) -> None:
        """On the event loop: hand the tokens out, and count."""
        start, end = span
        for text, event in outcomes:
            text.answers.put(event)
            if isinstance(event, Event):
                if text.newest:
                    self.metrics.next_token.observe(end - text.newest)
                else:
                    self.metrics.first_token.observe(end - text.submitted)
                    queued = text.begun - text.submitted
                    self.metrics.queue.observe(queued)
                    self.metrics.queue_us.add(1e6 * queued)
                    text.answers.queued = max(text.answers.queued, queued)
                text.newest = end
                text.answers.ran(text.begun, end)
                self.metrics.tokens.add()
        if rows:
            self.metrics.batches.add()
            self.metrics.rows.add(rows)
            self.metrics.batch_rows.observe(rows)
        self.metrics.model_us.add(1e6 * (end - start))
        self.metrics.predict.observe(end - start)
        self._gauges()

    def _tell(self, **fields: Any) -> None:
        self._loop.call_soon_threadsafe(lambda: self._say(**fields))


def _due(number: int) -> bool:
    """Whether so many a step is run in another way as well."""
    return number % RECHECK == 0 or number & (number - 1) == 0


def _is_last(event: Event | RequestError) -> bool:
    return isinstance(event, RequestError) or event.piece.finish is not None


def completion(pieces: Sequence[Piece], prompt: int) -> Completion:
    """A text from its pieces. prompt: tokens of what it follows."""
    text, tokens = "".join(p.text for p in pieces), tuple(p.token for p in pieces)
    return Completion(text, tokens, str(pieces[-1].finish), prompt, pieces[-1].stop)
