"""The threads in which the model runs, and the requests that wait for it on the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ... import tasks
from ...inputs.kind import Encoded
from ...process.niceness import IDLE, give_way
from ..beside import SMALL, Beside
from ..model import Answer, Model, difference, failure
from ..observe.metrics import Metrics
from ..refusals import DeadlineError, DrainingError, OverloadError, RequestError
from ..warm_up.exactness import ALONE, EQUAL
from .batching import Job, Refused, Scheduler
from .turns import Turns

RECHECK = 256  # of so many shared batches one is run alone as well, and numbers 1, 2, 4, 8 ...
HIT, MISS = "hit", "miss"  # of Result.cache


@dataclass(eq=False)
class Place:
    """Of a request that an engine admitted and that is on its way to it; to be closed."""

    client: str
    engine: Engine
    open: bool = True

    def close(self) -> None:
        """It no longer is."""
        self.engine.leave(self)


@dataclass(frozen=True)
class Call:
    """Who asks. deadline: on the engine's clock; of a text that is continued, of its first token,
    and last: of its end. priority: lower first. place: None for one not admitted yet."""

    client: str
    deadline: float
    priority: int = 0
    last: float = float("inf")
    place: Place | None = None


@dataclass(frozen=True)
class Times:
    """Of a request, by time.monotonic: when it was accepted, when the model began with the first of
    it, and when it had ended the last."""

    submitted: float
    begun: float
    ended: float

    @property
    def model(self) -> float:
        """Seconds."""
        return self.ended - self.begun


@dataclass
class Result:
    """answers: one per row. truncated: rows that were cut to what the model reads. queued, model:
    seconds, the largest of the request's rows. times: None where the model did not run. cache: HIT,
    MISS or another word for where the answers come from; "" where there is no cache."""

    answers: list[Any]
    truncated: int = 0
    tokens: int = 0
    queued: float = 0.0
    model: float = 0.0
    times: Times | None = None
    cache: str = ""


@dataclass(eq=False)
class _Request:
    """Some jobs that are answered together. values: by job."""

    done: asyncio.Future[None]
    jobs: list[Job] = field(default_factory=list)
    values: dict[Job, Any] = field(default_factory=dict)
    queued: float = 0.0
    model: float = 0.0
    submitted: float = 0.0
    begun: float = float("inf")
    ended: float = 0.0

    @property
    def times(self) -> Times:
        return Times(self.submitted, self.begun, self.ended)


@dataclass(eq=False)
class _Row:
    request: _Request
    payload: Encoded | Mapping[str, Any]  # a row of text, or raw tensors
    submitted: float


Outcome = tuple[Job, Any]


class Engine:
    """Answers requests with one model, in as many threads of its own as the scheduler has workers.
    Made on the event loop.

    say: receives what happened, as fields of a log line. niceness: of the threads, see
    process/niceness.py.
    """

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        metrics: Metrics,
        say: Callable[..., None],
        niceness: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.metrics, self.clock = model, metrics, clock
        self._scheduler, self._say = scheduler, say
        self._niceness = niceness
        self.beside = Beside()
        self._loop = asyncio.get_running_loop()
        self._turns = Turns(pause=niceness == IDLE)
        self._rows: dict[Job, _Row] = {}
        self._ready = threading.Condition()
        self._shared = 0  # batches with several rows
        self._threads = [
            threading.Thread(target=self._work, name=f"model {i}", daemon=True)
            for i in range(scheduler.limits.workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def draining(self) -> bool:
        return self._scheduler.draining

    @property
    def waiting(self) -> int:
        """Rows that wait for the model."""
        return self._scheduler.rows

    async def answer(
        self,
        inputs: Sequence[Any],
        pairs: Sequence[Any] | None,
        call: Call,
        parameters: Mapping[str, Any] | None = None,  # noqa: ARG002 - of texts that are continued
    ) -> Result:
        """The answers to inputs, in order. Raises RequestError; a request that is cancelled is
        dropped before it runs."""
        with self._placed(call) as place:
            await self._turns.turn()
            jobs, rows = await self._encoded(inputs, pairs, call)
            request = await self._finished(dict(zip(jobs, rows, strict=True)), call, place)
        return Result(
            [request.values[job] for job in jobs],
            sum(row.cut for row in rows),
            sum(row.size for row in rows),
            request.queued,
            request.model,
            request.times,
        )

    async def _encoded(
        self, inputs: Sequence[Any], pairs: Sequence[Any] | None, call: Call
    ) -> tuple[list[Job], list[Encoded]]:
        start = self.clock()
        size = sum(map(len, inputs)) + sum(len(p) for p in pairs or () if p is not None)
        if size > SMALL or not self.model.task.inputs.size:  # a small file may be a large image
            rows = await self.beside.run(call.client, partial(self.model.encode, inputs, pairs))
        else:
            rows = self.model.encode(inputs, pairs)
        self.metrics.preprocess.observe(self.clock() - start)
        jobs = []
        for row in rows:
            bucket, length = self.model.bucket(row)
            jobs.append(Job(bucket, length, call.client, call.priority, call.deadline))
        return jobs, rows

    async def infer(self, arrays: Mapping[str, Any], call: Call) -> Result:
        """The model's outputs for raw inputs, which run by themselves. Raises RequestError."""
        with self._placed(call) as place:
            arrays = self.model.checked(arrays)
            first = next(iter(arrays.values()))
            length = min(
                first.shape[1] if first.ndim > 1 else 1, tasks.longest(self.model.contract)
            )
            job = Job(object(), length, call.client, call.priority, call.deadline, len(first))
            request = await self._finished({job: arrays}, call, place)
        return Result(
            [request.values[job]],
            queued=request.queued,
            model=request.model,
            times=request.times,
        )

    def admit(self, client: str) -> Place:
        """The place of a request that is on its way. Raises RequestError where one of this client
        is refused whatever it holds."""
        try:
            with self._ready:
                self._scheduler.admit(self.clock(), client)
        except Refused as e:
            raise refusal(e) from None
        return Place(client, self)

    def leave(self, place: Place) -> None:
        """The request of this place does not come, unless it has."""
        with self._ready:
            if place.open:
                place.open = False
                self._scheduler.leave(place.client)

    @contextmanager
    def _placed(self, call: Call) -> Iterator[Place]:
        place = call.place
        if place is None or not place.open or place.engine is not self:
            place = self.admit(call.client)
        try:
            yield place
        finally:
            place.close()

    def drain(self) -> None:
        """Accept nothing more."""
        with self._ready:
            self._scheduler.drain()
            self._ready.notify_all()

    async def drained(self) -> None:
        """Wait until everything accepted is answered, and end the threads."""
        self.drain()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    async def _finished(self, payloads: Mapping[Job, Any], call: Call, place: Place) -> _Request:
        """The request, once all its jobs are answered."""
        now = self.clock()
        request = _Request(self._loop.create_future(), list(payloads), submitted=now)
        rows = {job: _Row(request, payload, now) for job, payload in payloads.items()}
        with self._ready:
            place.open = False
            try:
                self._scheduler.submit(now, request.jobs, admitted=True)
            except Refused as e:
                raise refusal(e) from None
            self._rows |= rows
            self._ready.notify()
        self.metrics.pending.set(self._scheduler.rows)
        try:
            await request.done
            await self._turns.turn()
        finally:
            with self._ready:
                for job in request.jobs:
                    if self._scheduler.cancel(job):
                        del self._rows[job]
        if self.clock() > call.deadline:
            raise DeadlineError("it was not answered within the request's time", retry_after=1.0)
        return request

    def _work(self) -> None:
        """A thread of the model: take, run, deliver, until drained."""
        give_way(self._niceness)
        while True:
            with self._ready:
                turn = self._scheduler.take(self.clock())
                while not turn.jobs and not turn.expired:
                    if self._scheduler.draining and not len(self._scheduler):
                        return
                    pause = turn.again - self.clock()
                    self._ready.wait(None if pause == float("inf") else max(pause, 0.0))
                    turn = self._scheduler.take(self.clock())
                taken = {job: self._rows.pop(job) for job in (*turn.jobs, *turn.expired)}
                if len(self._scheduler):  # who submits wakes one, and may have submitted more
                    self._ready.notify()
            late: list[Outcome] = [
                (job, DeadlineError("batches took longer than predicted", retry_after=1.0))
                for job in turn.expired
            ]
            start = self.clock()
            outcomes = self._run({job: taken[job].payload for job in turn.jobs})
            end = self.clock()
            self._loop.call_soon_threadsafe(self._deliver, taken, late, outcomes, (start, end))
            if turn.jobs:
                with self._ready:
                    self._scheduler.finish(end, turn)

    def _run(self, payloads: Mapping[Job, Any]) -> list[Outcome]:
        """Each job with its answer or an exception."""
        if not payloads:
            return []
        jobs, rows = list(payloads), list(payloads.values())
        try:
            if isinstance(rows[0], Encoded):
                order = sorted(range(len(rows)), key=lambda i: rows[i].size)
                answers = self._answers([rows[i] for i in order])
                return [(jobs[i], answer) for i, answer in zip(order, answers, strict=True)]
            return [(jobs[0], self.model.infer(rows[0]))]
        except Exception as e:  # whatever a runtime raises ends this batch and nothing else
            error = failure(e)
            if error is not e:
                self._tell(level="error", event="model_failed", error=type(e).__name__)
            return [(job, error) for job in jobs]

    def _answers(self, rows: Sequence[Encoded]) -> list[Answer | Exception]:
        """A batch's answers. Now and then they are compared with those of the rows alone: where a
        batch was found to change nothing at warm-up and does, those alone are given, and no batch
        is shared from then on."""
        answers = self.model.run(rows)
        if len(rows) == 1 or self.model.sharing != EQUAL:
            return answers
        with self._ready:
            self._shared += 1
            shared = self._shared
        if shared % RECHECK and shared & (shared - 1):
            return answers
        alone = [answer for row in rows for answer in self.model.run([row])]
        unequal = any(
            isinstance(a, Exception) or isinstance(b, Exception) or difference(a, b)
            for a, b in zip(alone, answers, strict=True)
        )
        self._loop.call_soon_threadsafe(self.metrics.rechecked.add)
        if unequal:
            self.model.sharing = ALONE
            self._loop.call_soon_threadsafe(self.metrics.unequal.add)
            self._tell(level="error", event="batches_change_answers", rows=len(rows))
        return alone

    def _deliver(
        self,
        taken: Mapping[Job, _Row],
        late: Sequence[Outcome],
        outcomes: Sequence[Outcome],
        span: tuple[float, float],
    ) -> None:
        """On the event loop: count, and wake the requests that are complete."""
        start, end = span
        metrics = self.metrics
        metrics.pending.set(self._scheduler.rows)
        if outcomes:
            rows = sum(job.rows for job, _ in outcomes)
            metrics.batches.add()
            metrics.rows.add(rows)
            metrics.model_us.add(1e6 * (end - start))
            metrics.predict.observe(end - start)
            metrics.batch_rows.observe(rows)
        for job, value in (*late, *outcomes):
            row = taken[job]
            request = row.request
            request.queued = max(request.queued, start - row.submitted)
            request.model = max(request.model, end - start)
            request.begun, request.ended = min(request.begun, start), max(request.ended, end)
            metrics.queue.observe(start - row.submitted)
            metrics.queue_us.add(1e6 * (start - row.submitted))
            request.values[job] = value
            if request.done.done():
                continue
            if isinstance(value, Exception):
                request.done.set_exception(value)
            elif len(request.values) == len(request.jobs):
                request.done.set_result(None)

    def _tell(self, **fields: Any) -> None:
        self._loop.call_soon_threadsafe(lambda: self._say(**fields))


def refusal(refused: Refused) -> RequestError:
    """What a client learns of a request that is not accepted."""
    wait = max(refused.retry_after, 0.0)
    if refused.reason == "deadline":
        return DeadlineError("it cannot be answered within the request's time", retry_after=wait)
    if refused.reason == "draining":
        return DrainingError("the server is ending", retry_after=max(wait, 1.0))
    return OverloadError("too much is waiting", retry_after=wait)
