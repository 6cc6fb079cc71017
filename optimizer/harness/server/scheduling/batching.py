"""Scheduler of batches: which waiting rows run next, and which requests are refused.

    scheduler.admit(now, client)         before a request is read: it is arriving, or Refused
    scheduler.submit(now, jobs)          accepted, or Refused is raised, at once
    batch = scheduler.schedule(now)      for a free worker: jobs to run, or when to ask again
    scheduler.postprocess(now, batch)    the batch is done

Pure: it has no clock, no thread and no socket. Called by engine.py. Times are seconds on any clock
that does not go back.

Batches    Rows of one bucket may share a batch. A free worker takes the rows that wait, up to
           `rows`; with `delay` the first row waits that long for others.
Order      fair_queue.py: priority, then fairness among clients.
Deadlines  Each accepted job is answered before its deadline as long as batches take no longer than
           `cost` predicts. A job is accepted only if an order is known in which every deadline
           holds (the plan); a batch runs only if such an order is known for the remaining jobs.
Overload   Queue limit by sojourn time (CoDel: Nichols, Jacobson 2012): up to `interval` seconds of
           work may wait; once rows have waited longer than `target` for an `interval`, up to
           `target` seconds, until the queue is empty. A client with less than its share of the
           queue may wait twice as long. Admission ignores a request's own cost, because requests
           are admitted before their body is parsed; arriving requests count as one small request
           each. An admitted request is refused later only if the queue exceeds twice its limit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .fair_queue import FairQueue, Job, Refused

EMA_DECAY = 0.9  # weight of the old estimate of `pace` after a faster batch, and of a small request


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a server's BatchScheduler.

    rows: maximum rows per batch
    delay: seconds that the first row of a batch waits for others
    target, interval: seconds of CoDel, see the module
    waiting: maximum rows in the queue, whatever they cost
    workers: batches that run at once
    """

    rows: int
    delay: float
    target: float
    interval: float
    waiting: int
    workers: int = 1


@dataclass(eq=False)
class BatchJob(Job):
    """Rows of a request that run together, usually one.

    size: length of the rows, the first argument of `cost`; the same for all jobs of a bucket
    rows: at most BatchLimits.rows, unless the job runs by itself
    """

    size: int


J = TypeVar("J", bound=BatchJob)


@dataclass(eq=False)
class ScheduledBatch(Generic[J]):
    """Decision of `BatchScheduler.schedule`.

    expired: accepted jobs that can no longer meet their deadline
    again: time of the next call if nothing is submitted before
    started, predicted: start of the batch, and its predicted seconds
    """

    jobs: list[J] = field(default_factory=list)
    expired: list[J] = field(default_factory=list)
    again: float = math.inf
    started: float = 0.0
    predicted: float = 0.0


class BatchScheduler(Generic[J]):
    """Chooses a server's next batch, in which all deadlines hold, and refuses requests under
    overload.

    cost(size, rows): predicted seconds of a batch; never less for more rows, and never more than
    the sum of its jobs run alone
    """

    def __init__(self, limits: BatchLimits, cost: Callable[[int, int], float]) -> None:
        self.limits, self._cost = limits, cost
        self.pace = 1.0  # recent ratio of measured to predicted seconds; at least 1
        self.standing = False  # rows have waited longer than the target for an interval
        self.draining = False
        self.waiting: FairQueue[J] = FairQueue()
        self.running: set[ScheduledBatch[J]] = set()
        self._plan: list[list[J]] = []  # an order that meets all deadlines; empty: any order does
        self._earliest = math.inf  # lower bound of the deadlines of waiting jobs
        self._arriving: Counter[str] = Counter()  # admitted requests that are still read, by client
        self._small = math.inf  # predicted seconds of a small request
        self._above_since: float | None = None

    def submit(self, now: float, jobs: Sequence[J], *, admitted: bool = False) -> None:
        """Accept into the queue the jobs of one request, or raise Refused for all of them.

        admitted: the request was admitted by `admit`, and no longer counts as arriving
        """
        if admitted:
            self.leave(jobs[0].client)
        if self.draining:
            raise Refused("draining", self._wait(now))
        costs = [self._seconds(job.size, job.rows) for job in jobs]
        self._refuse_full(now, sum(job.rows for job in jobs))
        priority = max(job.priority for job in jobs)
        if self.waiting:
            self.waiting.refuse_overload(
                jobs[0].client,
                self._wait(now, priority),
                self._limit,
                admitted=admitted and not priority,
            )
        for job, cost in zip(jobs, costs, strict=True):
            self.waiting.push(now, job, cost)
            self._earliest = min(self._earliest, job.deadline)
        plan = self._plan_waiting(self._free_at(now))
        if plan is None:
            for job in jobs:
                self._remove(job)
            raise Refused("deadline", self._wait(now))
        self._plan = plan
        self._small = min(sum(costs), self._small / EMA_DECAY)

    def admit(self, now: float, client: str) -> None:
        """Count a request of this client as arriving, until its `submit` or `leave`.

        Raises Refused, which costs less than to read the request first.
        """
        if self.draining:
            raise Refused("draining", self._wait(now))
        self._refuse_full(now, 1)
        if self.waiting:
            arriving = self._arriving.total() * self._small / self.limits.workers
            self.waiting.refuse_overload(
                client,
                self._wait(now, 0) + arriving,
                self._limit,
                arriving=self._arriving,
                arriving_seconds=self._arriving[client] * self._small,
            )
        self._arriving[client] += 1

    def leave(self, client: str) -> None:
        """Forget a request that was admitted to the queue and will not be submitted."""
        self._arriving[client] -= 1
        if not self._arriving[client]:
            del self._arriving[client]

    def schedule(self, now: float) -> ScheduledBatch[J]:
        """Choose the server's next batch for a free worker. `postprocess` must follow a batch with
        jobs."""
        batch = ScheduledBatch[J]()
        batch.expired = [job for job in self.waiting if now + job.seconds > job.deadline]
        for job in batch.expired:
            self._remove(job)
        if not self.waiting:
            self.standing, self._above_since = False, None
            return batch
        jobs, plan = self._next_batch(now)
        batch.again = self._delay_until(now, jobs)
        if batch.again > now:
            return batch
        batch.again, self._plan = math.inf, plan
        self._observe_sojourn(now, max(now - job.arrived for job in jobs))
        batch.jobs, batch.started, batch.predicted = jobs, now, self._seconds_of(jobs)
        self.waiting.start(jobs)
        self._reset_if_empty()
        self.running.add(batch)
        return batch

    def postprocess(self, now: float, batch: ScheduledBatch[J]) -> None:
        """Record that a batch has run; its duration corrects later predictions."""
        self.running.remove(batch)
        if batch.predicted > 0:
            ratio = (now - batch.started) / batch.predicted * self.pace
            self.pace = max(1.0, ratio, EMA_DECAY * self.pace + (1 - EMA_DECAY) * ratio)

    def abort(self, job: J) -> bool:
        """Drop a waiting job, whose client has left. Returns False if it runs or has run."""
        if job not in self.waiting:
            return False
        self._remove(job)
        return True

    def drain(self) -> None:
        """Refuse new requests, because the server ends; waiting jobs still run."""
        self.draining = True

    def _remove(self, job: J) -> None:
        self.waiting.remove(job)
        self._reset_if_empty()

    def _reset_if_empty(self) -> None:
        if not self.waiting:
            self._plan, self._earliest = [], math.inf

    def _seconds(self, size: int, rows: int) -> float:
        return self._cost(size, rows) * self.pace

    def _seconds_of(self, jobs: Sequence[J]) -> float:
        return self._seconds(jobs[0].size, sum(job.rows for job in jobs))

    @property
    def _limit(self) -> float:
        """Seconds of the model's work that may wait in the server's queue."""
        return self.limits.target if self.standing else self.limits.interval

    def _free_at(self, now: float) -> float:
        """Return the time at which a worker of the server is free.

        Several workers end the batches of a queue no later than one worker would that starts at
        this time and runs them in the same order.
        """
        if len(self.running) < self.limits.workers:
            return now
        return max(now, min(batch.started + batch.predicted for batch in self.running))

    def _wait(self, now: float, priority: float = math.inf) -> float:
        """Return the predicted seconds until a new job of this priority starts; by default of the
        lowest."""
        return self._free_at(now) - now + self.waiting.seconds(priority) / self.limits.workers

    def _refuse_full(self, now: float, rows: int) -> None:
        before = self.waiting.rows + self._arriving.total()
        if before and before + rows > self.limits.waiting:
            raise Refused("overload", self._wait(now))

    def _next_batch(self, now: float) -> tuple[list[J], list[list[J]]]:
        """Choose the largest batch from the front of the server's queue after which all deadlines
        hold.

        Returns (jobs of the batch, plan of batches for the remaining jobs); the plan's next batch
        if no such batch is known.
        """
        jobs = self.waiting.front(self.limits.rows)
        while jobs:
            end = now + self._seconds_of(jobs)
            if all(end <= job.deadline for job in jobs):
                taken = set(jobs)
                plan = self._plan_jobs(end, [job for job in self.waiting if job not in taken])
                if plan is not None:
                    return jobs, plan
            jobs = jobs[: len(jobs) // 2]
        for i, planned in enumerate(self._plan):
            jobs = [job for job in planned if job in self.waiting]
            if jobs:
                return jobs, self._plan[i + 1 :]
        # batches took longer than predicted and some deadline will be missed: the most urgent job
        return [min(self.waiting, key=lambda job: job.deadline)], []

    def _delay_until(self, now: float, jobs: Sequence[J]) -> float:
        """Return the time until which a batch that is not full may wait for rows of more
        requests."""
        full = sum(job.rows for job in jobs) >= self.limits.rows
        if full or self.draining or not self.limits.delay:
            return now
        until = min(job.arrived for job in jobs) + self.limits.delay
        plan = self._plan_waiting(until)
        if until <= now or plan is None:
            return now
        self._plan = plan
        return until

    def _plan_waiting(self, start: float) -> list[list[J]] | None:
        """Plan all waiting jobs of requests; in constant time where even the sum of their seconds
        ends before any deadline."""
        if start + self.waiting.seconds() <= self._earliest:
            return []
        self._earliest = min((job.deadline for job in self.waiting), default=math.inf)
        return self._plan_jobs(start, self.waiting)

    def _plan_jobs(self, start: float, waiting: Iterable[J]) -> list[list[J]] | None:
        """Find an order of requests' jobs from `start` in which every deadline holds.

        Returns [] where any order does, None where neither of two orders does: by deadline one by
        one, or by deadline in full batches.
        """
        jobs = list(waiting)
        first = min((job.deadline for job in jobs), default=math.inf)
        if first == math.inf or start + sum(job.seconds for job in jobs) <= first:
            return []
        jobs.sort(key=lambda job: job.deadline)
        for rows in (1, self.limits.rows):
            batches = _batch_by_deadline(jobs, rows)
            end = start
            for batch in batches:
                end += self._seconds_of(batch)
                if end > batch[0].deadline:
                    break
            else:
                return batches
        return None

    def _observe_sojourn(self, now: float, sojourn: float) -> None:
        """Update CoDel's state, by which the server refuses requests, after a batch.

        sojourn: seconds that the oldest row of the batch waited
        """
        if sojourn < self.limits.target:
            self._above_since = None
        elif self._above_since is None:
            self._above_since = now
        elif now - self._above_since >= self.limits.interval:
            self.standing = True


def _batch_by_deadline(jobs: Sequence[J], rows: int) -> list[list[J]]:
    """Divide requests' jobs into batches of at most `rows` rows, the most urgent job first.

    jobs: jobs sorted by deadline

    A batch holds the most urgent remaining job, and the next most urgent ones of the same bucket.
    """
    batches: list[list[J]] = []
    unfilled: dict[Hashable, list[J]] = {}
    for job in jobs:
        batch = unfilled.get(job.bucket)
        if batch is None or sum(j.rows for j in batch) + job.rows > rows:
            batch = []
            unfilled[job.bucket] = batch
            batches.append(batch)
        batch.append(job)
    return batches
