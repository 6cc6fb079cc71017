"""Engine of models that answer in one run: its threads, and the requests that wait for them.

A request becomes jobs (RowJob); BatchScheduler groups jobs into batches; a thread of the model runs
each batch and hands the answers back to the event loop. Called by inference.py and embedded.py.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ... import tasks
from ...inputs.kind import Encoded
from ...process.niceness import give_way
from ..model import PROMPT, TENSORS, Answer, ServedModel, client_failure, difference
from ..observe.metrics import Metrics
from ..refusals import DeadlineError, DrainingError, OverloadError, RequestError
from ..request import QueuePlace, Request, Result, Times
from ..warm_up.sharing import ALONE, EQUAL
from ..worker_threads import TOKENIZED, WorkerThreads
from .batching import BatchJob, BatchLimits, BatchScheduler, ScheduledBatch
from .fair_queue import Refused

RECHECK = 256  # one shared batch in RECHECK is verified row by row, and numbers 1, 2, 4, 8 ...


@dataclass(eq=False)
class RowJob(BatchJob):
    """Job of a BatchEngine: one encoded row, or raw tensors, that a request waits for.

    It holds the future of its answer, and the times and rows of its batch.
    """

    payload: Encoded | Mapping[str, Any]
    answer: asyncio.Future[Any] = field(kw_only=True)
    begun: float = field(default=0.0, init=False)
    ended: float = field(default=0.0, init=False)
    batch: int = field(default=0, init=False)


class BatchEngine:
    """Runs a server's requests of one model in batches, with one thread per worker of the
    scheduler. Made on the event loop.

    say: function that logs one line
    niceness: see process/niceness.py
    """

    def __init__(
        self,
        model: ServedModel,
        scheduler: BatchScheduler[RowJob],
        metrics: Metrics,
        say: Callable[..., None],
        niceness: int = 0,
    ) -> None:
        self.model, self.metrics, self.clock = model, metrics, time.monotonic
        self._scheduler, self._say = scheduler, say
        self._niceness = niceness
        self.worker_threads = WorkerThreads()
        self._loop = asyncio.get_running_loop()
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
    def limits(self) -> BatchLimits:
        return self._scheduler.limits

    @property
    def waiting(self) -> int:
        """Return the number of requests' rows that wait for the model."""
        return self._scheduler.waiting.rows

    async def answer(
        self,
        inputs: Sequence[Any],
        pairs: Sequence[Any] | None,
        request: Request,
        parameters: Mapping[str, Any] | None = None,
    ) -> Result:
        """Answer a request's inputs: a Result with one answer per input, in order.

        parameters: parameters of the request, of which `prompt_name` is read

        A cancelled request is dropped if it still waits. Raises RequestError.
        """
        with self._placed(request) as place:
            prompt = (parameters or {}).get(PROMPT)
            rows = await self._encode(inputs, pairs, request, prompt)
            parts = [part for row in rows for part in row.parts]
            jobs = [self._job(part, *self.model.bucket(part), request) for part in parts]
            await self._finish(jobs, request, place)
        cut, tokens = sum(row.cut for row in rows), sum(row.whole or row.size for row in rows)
        result = _result(jobs, cut, tokens)
        result.answers = self.model.merge(rows, result.answers)
        if self.model.task.inputs.size:
            result.lengths = tuple(part.size for part in parts)
        return result

    async def _encode(
        self, inputs: Sequence[Any], pairs: Sequence[Any] | None, request: Request, prompt: object
    ) -> list[Encoded]:
        start = self.clock()
        size = sum(map(len, inputs)) + sum(len(p) for p in pairs or () if p is not None)
        if size > TOKENIZED or not self.model.task.inputs.size:  # a small file may be a large image
            work = partial(self.model.encode, inputs, pairs, prompt)
            rows = await self.worker_threads.run(request.client, work)
        else:
            rows = self.model.encode(inputs, pairs, prompt)
        self.metrics.preprocess.observe(self.clock() - start)
        return rows

    def _job(
        self, payload: Any, bucket: Hashable, size: int, request: Request, rows: int = 1
    ) -> RowJob:
        return RowJob(
            size,
            payload,
            answer=self._loop.create_future(),
            bucket=bucket,
            client=request.client,
            priority=request.priority,
            deadline=request.deadline,
            rows=rows,
        )

    async def infer(self, arrays: Mapping[str, Any], request: Request) -> Result:
        """Run a request's raw tensors as a batch of their own; the Result's only answer is {output:
        array}.

        Raises RequestError.
        """
        with self._placed(request) as place:
            arrays = self.model.check_inputs(arrays)
            first = next(iter(arrays.values()))
            length = min(
                first.shape[1] if first.ndim > 1 else 1, tasks.longest(self.model.contract)
            )
            job = self._job(arrays, object(), length, request, len(first))
            await self._finish([job], request, place)
        return _result([job])

    def admit(self, client: str) -> QueuePlace:
        """Admit a request before it is read; return its place in the queue.

        Raises RequestError if every request of this client would be refused now.
        """
        try:
            with self._ready:
                self._scheduler.admit(self.clock(), client)
        except Refused as e:
            raise client_refusal(e) from None
        return QueuePlace(client, self.leave)

    def leave(self, place: QueuePlace) -> None:
        """Give up a place in the queue, unless its request has been submitted."""
        with self._ready:
            if place.open:
                place.open = False
                self._scheduler.leave(place.client)

    @contextmanager
    def _placed(self, request: Request) -> Iterator[QueuePlace]:
        place = request.place
        if place is None or not place.open or place.leave != self.leave:
            place = self.admit(request.client)
        try:
            yield place
        finally:
            place.close()

    def drain(self) -> None:
        """Refuse new requests, because the server ends."""
        with self._ready:
            self._scheduler.drain()
            self._ready.notify_all()

    async def wait_until_drained(self) -> None:
        """Wait until all accepted requests are answered, and end the threads."""
        self.drain()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    async def _finish(self, jobs: Sequence[RowJob], request: Request, place: QueuePlace) -> None:
        """Submit the jobs of a request, and wait until all are answered. Raises RequestError."""
        with self._ready:
            place.open = False
            try:
                self._scheduler.submit(self.clock(), jobs, admitted=True)
            except Refused as e:
                raise client_refusal(e) from None
            self._ready.notify()
        self.metrics.pending.set(self._scheduler.waiting.rows)
        try:
            await asyncio.gather(*(job.answer for job in jobs))
        finally:
            with self._ready:
                for job in jobs:
                    self._scheduler.abort(job)
        if self.clock() > request.deadline:
            raise DeadlineError("the request was not answered before its timeout", retry_after=1.0)

    def _work(self) -> None:
        """Run a thread of the model: choose a batch, run it, hand out its answers, until the server
        has drained."""
        give_way(self._niceness)
        while True:
            with self._ready:
                batch = self._scheduler.schedule(self.clock())
                while not batch.jobs and not batch.expired:
                    if self._scheduler.draining and not self._scheduler.waiting:
                        return
                    pause = batch.again - self.clock()
                    self._ready.wait(None if pause == float("inf") else max(pause, 0.0))
                    batch = self._scheduler.schedule(self.clock())
                if self._scheduler.waiting:  # `submit` wakes one thread, whatever it submits
                    self._ready.notify()
            start = self.clock()
            answers = self._run(batch.jobs)
            end = self.clock()
            self._loop.call_soon_threadsafe(self._deliver, batch, answers, start, end)
            if batch.jobs:
                with self._ready:
                    self._scheduler.postprocess(end, batch)

    def _run(self, jobs: Sequence[RowJob]) -> list[Any]:
        """Run a batch of requests' rows; return the answers of its jobs in order, with an exception
        for a failed job."""
        if not jobs:
            return []
        rows: list[Any] = [job.payload for job in jobs]
        try:
            if not isinstance(rows[0], Encoded):
                return [self.model.infer(rows[0])]
            order = sorted(range(len(rows)), key=lambda i: rows[i].size)
            answers = dict(zip(order, self._answers([rows[i] for i in order]), strict=True))
            return [answers[i] for i in range(len(rows))]
        except Exception as e:  # any failure of a runtime ends this batch and nothing else
            error = client_failure(e)
            if error is not e:
                self._tell(level="error", event="model_failed", error=type(e).__name__)
            return [error] * len(jobs)

    def _answers(self, rows: Sequence[Encoded]) -> list[Answer | Exception]:
        """Run requests' rows as one batch: an answer or an exception per row.

        Shared batches 1, 2, 4, 8 ... and multiples of RECHECK are run again row by row, for answers
        to return. If any differs, although warm-up found no difference, later rows run alone.
        """
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
        self, batch: ScheduledBatch[RowJob], answers: Sequence[Any], start: float, end: float
    ) -> None:
        """Count a batch and hand its answers to the requests that wait; on the event loop."""
        metrics = self.metrics
        metrics.pending.set(self._scheduler.waiting.rows)
        rows = sum(job.rows for job in batch.jobs)
        if batch.jobs:
            metrics.batches.add()
            metrics.rows.add(rows)
            metrics.model_us.add(1e6 * (end - start))
            metrics.predict.observe(end - start)
            metrics.batch_rows.observe(rows)
            raw = not isinstance(batch.jobs[0].payload, Encoded)
            metrics.statistics[self.model.name + TENSORS * raw].record_run(rows, end - start)
        late = DeadlineError("batches took longer than predicted", retry_after=1.0)
        for job, answer in (
            *((job, late) for job in batch.expired),
            *zip(batch.jobs, answers, strict=True),
        ):
            job.begun, job.ended, job.batch = start, end, rows
            metrics.queue.observe(start - job.arrived)
            metrics.queue_us.add(1e6 * (start - job.arrived))
            if job.answer.done():  # cancelled with its request
                continue
            if isinstance(answer, Exception):
                job.answer.set_exception(answer)
            else:
                job.answer.set_result(answer)

    def _tell(self, **fields: Any) -> None:
        self._loop.call_soon_threadsafe(lambda: self._say(**fields))


def _result(jobs: Sequence[RowJob], truncated: int = 0, tokens: int = 0) -> Result:
    """Return the Result of a request whose jobs are all answered."""
    return Result(
        [job.answer.result() for job in jobs],
        truncated,
        tokens,
        max(job.begun - job.arrived for job in jobs),
        max(job.ended - job.begun for job in jobs),
        Times(jobs[0].arrived, min(job.begun for job in jobs), max(job.ended for job in jobs)),
        rows=sum(job.rows for job in jobs),
        batch=max(job.batch for job in jobs),
    )


def client_refusal(refused: Refused) -> RequestError:
    """Convert a scheduler's refusal to the error that the client gets."""
    wait = max(refused.retry_after, 0.0)
    if refused.reason == "deadline":
        return DeadlineError("the request cannot be answered before its timeout", retry_after=wait)
    if refused.reason == "draining":
        return DrainingError("the server is shutting down", retry_after=max(wait, 1.0))
    return OverloadError("the queue is full", retry_after=wait)
