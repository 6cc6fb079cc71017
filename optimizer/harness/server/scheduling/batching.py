"""Which waiting rows run next, and which are refused: no clock, no thread, no socket.

    scheduler.admit(now, client)     before a request is read: it is on its way, or Refused
    scheduler.submit(now, jobs)      accepted, or Refused is raised, at once
    turn = scheduler.take(now)       when the worker is free: a batch, or when to ask again
    scheduler.finish(now)            the batch is done

Batches  Rows that may share a batch have one bucket. A free worker takes what waits, up to `rows`;
         with `delay` it lets the first row wait that long for others.
Order    Priority first; within one, clients share the worker evenly (start-time fair queueing:
         Goyal, Vin, Cheng 1996), so a flood of one client delays the others by little.
Deadline Each accepted job is answered before its deadline as long as batches take no longer than
         `cost` says. A job is accepted only if an order is known in which every deadline holds
         (the plan); a batch runs only if one is known for the rest after it.
Overload The work that may wait is limited by how long rows did wait (CoDel: Nichols, Jacobson
         2012): bursts of up to `interval` seconds of work are accepted, and once rows have waited
         longer than `target` for an `interval`, no more than `target`, until nothing waits.
         A client with less than its share of the queue may have as much again. What a request
         costs itself does not count: it is known once the request is read, and a refusal is to
         come before that. While rows wait, those on their way count as well, as much as small
         requests did of late. What was admitted is refused afterwards only where twice as much
         waits as may: to read it would have been in vain.

Times are seconds on any clock that does not go back.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

FORGET = 0.9  # of the pace, at each batch that was quicker; of a small request, at each larger


@dataclass(frozen=True)
class Limits:
    """rows: of a batch. delay: seconds that the first row of a batch waits for others. target,
    interval: of the queue, see the module. waiting: rows that may wait, whatever they cost.
    workers: batches that run at once."""

    rows: int
    delay: float
    target: float
    interval: float
    waiting: int
    workers: int = 1


@dataclass(frozen=True, eq=False)
class Job:
    """Rows that run together, as a rule one.

    bucket: what jobs of one batch have in common. size: what cost takes, alike within a bucket.
    rows: how many, at most Limits.rows unless the job is to run by itself. priority: lower runs
    first. deadline: the latest time of the answer.
    """

    bucket: Hashable
    size: int
    client: str = ""
    priority: int = 0
    deadline: float = math.inf
    rows: int = 1


@dataclass(eq=False)
class Turn:
    """jobs: those that run now. expired: accepted ones that no longer make their deadline, as a
    batch took longer than predicted. again: when to ask again, if nothing is submitted before.
    started, predicted: of the batch, its seconds as the scheduler expects them."""

    jobs: list[Job] = field(default_factory=list)
    expired: list[Job] = field(default_factory=list)
    again: float = math.inf
    started: float = 0.0
    predicted: float = 0.0


class Refused(Exception):
    """reason: overload, deadline, draining. retry_after: seconds until it may be accepted."""

    def __init__(self, reason: str, retry_after: float) -> None:
        super().__init__(reason)
        self.reason, self.retry_after = reason, retry_after


@dataclass(order=True)
class _Waiting:
    """A job in the queue. key: its place in the order; cost: of it alone."""

    key: tuple[int, float, int]
    job: Job = field(compare=False)
    arrived: float = field(compare=False)
    cost: float = field(compare=False)


class Scheduler:
    """See the module. cost(size, rows): seconds of a batch; never less for more rows, and a batch
    never more than its jobs alone."""

    def __init__(self, limits: Limits, cost: Callable[[int, int], float]) -> None:
        self.limits, self._cost = limits, cost
        self.pace = 1.0  # how many times the predicted time batches take of late; at least 1
        self.standing = False  # rows waited longer than the target for an interval
        self.draining = False
        self._waiting: dict[Job, _Waiting] = {}
        self._buckets: dict[Hashable, list[_Waiting]] = {}  # heaps; may hold jobs that left
        self._plan: list[list[Job]] = []  # an order that keeps all deadlines; empty: any does
        self._earliest = math.inf  # no deadline of a job that waits lies before it
        self._work: Counter[int] = Counter()  # rows by priority ...
        self._seconds: dict[int, float] = {}  # ... and their predicted seconds
        self._clients: Counter[str] = Counter()
        self._coming: Counter[str] = Counter()  # requests on their way, by client
        self._small = math.inf  # predicted seconds of a small request
        self._shares: dict[str, float] = {}  # predicted seconds that wait, by client
        self._tags: dict[str, float] = {}  # where the next job of a client begins in virtual time
        self._virtual = 0.0
        self._number = 0
        self._running: set[Turn] = set()
        self._above_since: float | None = None

    def __len__(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    @property
    def rows(self) -> int:
        """Rows that wait."""
        return sum(self._work.values())

    def submit(self, now: float, jobs: Sequence[Job], *, admitted: bool = False) -> None:
        """Accept the jobs of one request, all or none. admitted: by `admit`; it is no longer on
        its way, be it accepted or not. Raises Refused."""
        if admitted:
            self.leave(jobs[0].client)
        if self.draining:
            raise Refused("draining", self._wait(now, None))
        costs = [self._of(job.size, job.rows) for job in jobs]
        self._refuse_too_many(now, sum(job.rows for job in jobs))
        priority = max(job.priority for job in jobs)
        self._refuse_overload(now, jobs[0].client, priority, admitted=admitted and not priority)
        for job, cost in zip(jobs, costs, strict=True):
            self._add(now, job, cost)
        plan = self._planned_all(self._free_at(now))
        if plan is None:
            for job in jobs:
                self._remove(job)
            raise Refused("deadline", self._wait(now, None))
        self._plan = plan
        self._small = min(sum(costs), self._small / FORGET)

    def admit(self, now: float, client: str) -> None:
        """A request of this client is on its way, to be followed by its `submit`, or by `leave`; or
        it is refused, before it is read, which costs more than to refuse it. Raises Refused."""
        if self.draining:
            raise Refused("draining", self._wait(now, None))
        self._refuse_too_many(now, 1)
        self._refuse_overload(now, client, 0, coming=self._coming)
        self._coming[client] += 1

    def leave(self, client: str) -> None:
        """A request that was admitted does not come."""
        self._coming[client] -= 1
        if not self._coming[client]:
            del self._coming[client]

    def take(self, now: float) -> Turn:
        """What a free worker does now. A turn with jobs is to be followed by its `finish`."""
        turn = Turn()
        turn.expired = [j for j, w in self._waiting.items() if now + w.cost > j.deadline]
        for job in turn.expired:
            self._remove(job)
        if not self._waiting:
            self.standing, self._above_since = False, None
            return turn
        batch, plan = self._chosen(now)
        turn.again = self._may_wait(now, batch)
        if turn.again > now:
            return turn
        turn.again, self._plan = math.inf, plan
        self._observe(now, max(now - w.arrived for w in batch))
        self._virtual = max(self._virtual, batch[0].key[1])
        for waiting in batch:
            self._remove(waiting.job)
        turn.jobs = [w.job for w in batch]
        turn.started, turn.predicted = now, self._seconds_of(batch)
        self._running.add(turn)
        return turn

    def finish(self, now: float, turn: Turn) -> None:
        """The batch of this turn is done; how long it took corrects what is predicted."""
        self._running.remove(turn)
        if turn.predicted > 0:
            ratio = (now - turn.started) / turn.predicted * self.pace
            self.pace = max(1.0, ratio, FORGET * self.pace + (1 - FORGET) * ratio)

    def cancel(self, job: Job) -> bool:
        """Drop a job that waits. False when it does not: it runs, or has run."""
        if job not in self._waiting:
            return False
        self._remove(job)
        return True

    def drain(self) -> None:
        """Accept nothing more; what waits is still run."""
        self.draining = True

    def _of(self, size: int, rows: int) -> float:
        return self._cost(size, rows) * self.pace

    def _seconds_of(self, batch: Sequence[_Waiting]) -> float:
        return self._of(batch[0].job.size, sum(w.job.rows for w in batch))

    def _free_at(self, now: float) -> float:
        """When a worker is free. Batches one after another from then on end no sooner than those
        that several workers take in the same order."""
        if len(self._running) < self.limits.workers:
            return now
        return max(now, min(turn.started + turn.predicted for turn in self._running))

    def _wait(self, now: float, priority: int | None) -> float:
        """Predicted seconds until a job of this priority would start; None: the last one."""
        ahead = (s for p, s in self._seconds.items() if priority is None or p <= priority)
        return self._free_at(now) - now + sum(ahead) / self.limits.workers

    def _refuse_too_many(self, now: float, rows: int) -> None:
        before = self.rows + self._coming.total()
        if before and before + rows > self.limits.waiting:
            raise Refused("overload", self._wait(now, None))

    def _refuse_overload(
        self,
        now: float,
        client: str,
        priority: int,
        *,
        coming: Mapping[str, int] = MappingProxyType({}),
        admitted: bool = False,
    ) -> None:
        """priority: of the rows, the one that waits longest. coming: requests by client that count
        as small ones."""
        if not self._waiting:
            return
        wait = self._wait(now, priority) + sum(coming.values()) * self._small / self.limits.workers
        allowed = self.limits.target if self.standing else self.limits.interval
        if wait <= allowed:
            return
        share = self._shares.get(client, 0.0) + coming.get(client, 0) * self._small
        sharing = len(self._shares.keys() | coming.keys() | {client})
        if wait > 2 * allowed or (share > allowed / sharing and not admitted):
            raise Refused("overload", wait - allowed)

    def _add(self, now: float, job: Job, cost: float) -> None:
        self._number += 1
        start = max(self._virtual, self._tags.get(job.client, 0.0))
        self._tags[job.client] = start + cost
        waiting = _Waiting((job.priority, start, self._number), job, now, cost)
        self._earliest = min(self._earliest, job.deadline)
        self._waiting[job] = waiting
        heapq.heappush(self._buckets.setdefault(job.bucket, []), waiting)
        self._work[job.priority] += job.rows
        self._seconds[job.priority] = self._seconds.get(job.priority, 0.0) + cost
        self._clients[job.client] += 1
        self._shares[job.client] = self._shares.get(job.client, 0.0) + cost

    def _remove(self, job: Job) -> None:
        waiting = self._waiting.pop(job)
        self._work[job.priority] -= job.rows
        self._seconds[job.priority] -= waiting.cost
        self._clients[job.client] -= 1
        self._shares[job.client] -= waiting.cost
        if not self._work[job.priority]:
            del self._work[job.priority], self._seconds[job.priority]
        if not self._clients[job.client]:
            del self._clients[job.client], self._shares[job.client], self._tags[job.client]
        if not self._waiting:
            self._buckets.clear()
            self._plan, self._earliest = [], math.inf

    def _chosen(self, now: float) -> tuple[list[_Waiting], list[list[Job]]]:
        """The largest batch from the front of the order after which all deadlines hold, and the
        plan for the rest; the plan's next one where no such batch is known."""
        batch = self._front()
        while batch:
            end = now + self._seconds_of(batch)
            if all(end <= w.job.deadline for w in batch):
                taken = {w.job for w in batch}
                rest = [w for job, w in self._waiting.items() if job not in taken]
                plan = self._planned(end, rest)
                if plan is not None:
                    return batch, plan
            batch = batch[: len(batch) // 2]
        for i, jobs in enumerate(self._plan):
            planned = [self._waiting[job] for job in jobs if job in self._waiting]
            if planned:
                return planned, self._plan[i + 1 :]
        # batches took longer than predicted and some deadline will be missed: the most urgent one
        return [min(self._waiting.values(), key=lambda w: w.job.deadline)], []

    def _front(self) -> list[_Waiting]:
        """The first job of the order, and the next ones of its bucket while they fit."""
        for bucket in list(self._buckets):
            heap = self._buckets[bucket]
            while heap and heap[0].job not in self._waiting:
                heapq.heappop(heap)
            if not heap:
                del self._buckets[bucket]
        heap = min(self._buckets.values(), key=lambda h: h[0])
        batch, rows = list[_Waiting](), 0
        while heap:
            waiting = heap[0]
            if waiting.job in self._waiting:
                if batch and rows + waiting.job.rows > self.limits.rows:
                    break
                batch.append(waiting)
                rows += waiting.job.rows
            heapq.heappop(heap)
        for waiting in batch:  # a smaller batch, or the plan's, may be run
            heapq.heappush(heap, waiting)
        return batch

    def _may_wait(self, now: float, batch: Sequence[_Waiting]) -> float:
        """Until when the batch may wait for more rows."""
        full = sum(w.job.rows for w in batch) >= self.limits.rows
        if full or self.draining or not self.limits.delay:
            return now
        until = min(w.arrived for w in batch) + self.limits.delay
        plan = self._planned_all(until)
        if until <= now or plan is None:
            return now
        self._plan = plan
        return until

    def _planned_all(self, start: float) -> list[list[Job]] | None:
        """The plan for all that wait; without looking at each where even the sum of their times
        ends before any deadline."""
        if start + sum(self._seconds.values()) <= self._earliest:
            return []
        self._earliest = min((job.deadline for job in self._waiting), default=math.inf)
        return self._planned(start, self._waiting.values())

    def _planned(self, start: float, waiting: Iterable[_Waiting]) -> list[list[Job]] | None:
        """An order from `start` in which every deadline holds: [] where any order does, None where
        neither of two was found: by deadline one by one, or in full batches."""
        jobs = list(waiting)
        first = min((w.job.deadline for w in jobs), default=math.inf)
        if first == math.inf or start + sum(w.cost for w in jobs) <= first:
            return []
        jobs.sort(key=lambda w: w.job.deadline)
        for rows in (1, self.limits.rows):
            batches = _by_deadline(jobs, rows)
            end = start
            for batch in batches:
                end += self._seconds_of(batch)
                if end > batch[0].job.deadline:
                    break
            else:
                return [[w.job for w in batch] for batch in batches]
        return None

    def _observe(self, now: float, sojourn: float) -> None:
        """CoDel's state, from how long a row of the batch that starts has waited."""
        if sojourn < self.limits.target:
            self._above_since = None
        elif self._above_since is None:
            self._above_since = now
        elif now - self._above_since >= self.limits.interval:
            self.standing = True


def _by_deadline(jobs: Sequence[_Waiting], rows: int) -> list[list[_Waiting]]:
    """Batches of at most `rows`, each begun by the most urgent job that is left, with the next
    most urgent ones of its bucket."""
    batches: list[list[_Waiting]] = []
    unfilled: dict[Hashable, list[_Waiting]] = {}
    for waiting in jobs:
        batch = unfilled.get(waiting.job.bucket)
        if batch is None or sum(w.job.rows for w in batch) + waiting.job.rows > rows:
            batch = []
            unfilled[waiting.job.bucket] = batch
            batches.append(batch)
        batch.append(waiting)
    return batches
