"""Which texts are continued next, and which are refused: no clock, no thread, no model.

    scheduler.submit(now, jobs)      all accepted, or Refused is raised, at once
    turn = scheduler.take(now)       when the worker is free: a piece of a prompt, or one step
    scheduler.finish(now, ended)     the turn is done; these texts are complete

Slots    A text has one from the first piece of its prompt to its last token, and with it room for
         all the tokens that it may have: nothing that runs is ever put out for want of memory.
Turns    A piece of one prompt, then one step of all the texts that run, then a piece again: a text
         joins those that run as soon as its prompt is read, and waits for none of them to end;
         what runs waits for one piece between two tokens.
Order    Priority first; within one, clients share the slots evenly (start-time fair queueing:
         Goyal, Vin, Cheng 1996), by the seconds that their texts are predicted to take.
Deadline of the first token, and of the whole answer. A job that is predicted to miss the first is
         refused at once; a text that misses either is ended, and its slot is free.
Overload No more waits than is predicted to begin within `wait`; a client with less than its share
         of the queue may have as much again.

How long an answer becomes is not known before: it is predicted to take as large a part of what it
may have as answers took of late. What of a prompt need not be read (prefixes.py) is known when it
has its slot, and is predicted to be read until then. Times are seconds on any clock that does not
go back.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from .batching import Refused

FORGET = 0.9  # of the share of their tokens that answers take, at each that ends


@dataclass(frozen=True)
class Limits:
    """slots: texts at once. waiting: texts that may wait. wait: seconds that one may wait for its
    first token. piece: tokens of a prompt that are read in one turn."""

    slots: int
    waiting: int
    wait: float
    piece: int


@dataclass(frozen=True)
class Costs:
    """Seconds. read(tokens): of a piece of a prompt; step(texts): of one token for each."""

    read: Callable[[int], float]
    step: Callable[[int], float]


@dataclass(frozen=True, eq=False)
class Job:
    """One text. prompt: its tokens. answer: how many may follow. priority: lower runs first.
    first, deadline: the latest times of the first token and of the last."""

    prompt: int
    answer: int
    client: str = ""
    priority: int = 0
    first: float = math.inf
    deadline: float = math.inf


@dataclass
class Turn:
    """read: tokens start..stop of a job's prompt, or step: one token of each; or neither, where
    nothing is to do. expired: accepted jobs whose time is up, left: those that had a slot and whose
    client has gone; what slots they had are free."""

    read: tuple[Job, int, int] | None = None
    step: list[Job] = field(default_factory=list)
    expired: list[Job] = field(default_factory=list)
    left: list[Job] = field(default_factory=list)

    @property
    def run(self) -> list[Job]:
        """The texts that the model runs for."""
        return self.step if self.read is None else [self.read[0]]

    @property
    def jobs(self) -> list[Job]:
        return [*self.run, *self.expired, *self.left]


def pieces(length: int, size: int, whole: int) -> list[tuple[int, int]]:
    """A prompt of so many tokens as pieces of about `size`. Where one is cut at multiples of
    `whole`, as `predict` cuts it, these are cut too; and no piece is one token that is none there:
    a row of one and rows of several are computed by different kernels."""
    parts = []
    for first in range(0, length, whole):
        last = min(first + whole, length)
        start = first
        while start < last:
            stop = min(start + size, last)
            stop = last if last - stop == 1 else stop
            parts.append((start, stop))
            start = stop
    return parts


def _nothing(job: Job) -> int:
    del job
    return 0


class Scheduler:
    """See the module. whole: see pieces. kept: tokens at the beginning of a prompt that need not be
    read, at an end of a piece and before the last one."""

    def __init__(
        self, limits: Limits, costs: Costs, whole: int, kept: Callable[[Job], int] = _nothing
    ) -> None:
        self.limits, self._costs, self._whole = limits, costs, whole
        self.kept = kept
        self.draining = False
        self.share = 1.0  # of the tokens they may have, that answers take
        self._waiting: list[tuple[tuple[int, float, int], Job]] = []  # a heap; may hold some gone
        self._queued: dict[Job, float] = {}  # and their predicted seconds
        self._reading: tuple[Job, list[tuple[int, int]]] | None = None
        self._running: dict[Job, int] = {}  # tokens so far
        self._gone: list[Job] = []  # have a slot, and nobody who waits for them
        self._stepped = True  # the turn before was no piece of a prompt
        self._clients: Counter[str] = Counter()
        self._shares: dict[str, float] = {}
        self._tags: dict[str, float] = {}
        self._virtual, self._number = 0.0, 0

    def __len__(self) -> int:
        """Jobs that wait or run."""
        return len(self._queued) + self.active

    @property
    def waiting(self) -> int:
        """Jobs that have no slot yet."""
        return len(self._queued)

    @property
    def active(self) -> int:
        """Slots that are taken."""
        return len(self._running) + (self._reading is not None)

    def check(self, now: float, client: str) -> None:  # noqa: ARG002 - as batching.Scheduler has it
        """Refuse now what `submit` would refuse of this client whatever it asks for."""
        self._refuse([Job(0, 0, client)])

    def submit(self, now: float, jobs: Sequence[Job]) -> None:
        """Accept the jobs, or raise Refused for all of them."""
        costs = [self._cost(job) for job in jobs]
        self._refuse(jobs)
        begins = now + self._wait()
        for job in jobs:
            begins += self._read(job.prompt)
            if begins > job.first:
                raise Refused("deadline", self._wait())
        for job, cost in zip(jobs, costs, strict=True):
            self._add(job, cost)

    def take(self, now: float) -> Turn:
        """What a free worker does now; to be followed by `finish`."""
        turn = Turn(left=self._gone)
        self._gone = []
        self._expire(now, turn)
        if self._reading is None and self.active < self.limits.slots:
            job = self._next()
            if job is not None:
                parts = pieces(job.prompt, self.limits.piece, self._whole)
                kept = self.kept(job)
                self._reading = (job, [part for part in parts if part[0] >= kept])
        if self._reading is not None and (self._stepped or not self._running):
            job, parts = self._reading
            turn.read = (job, *parts.pop(0))
            if not parts:
                self._reading, self._running[job] = None, 0
        else:
            turn.step = list(self._running)
        self._stepped = turn.read is None
        for job in turn.run:
            if job in self._running:
                self._running[job] += 1
        return turn

    def finish(self, ended: Collection[Job]) -> None:
        """The turn is done. ended: texts that are complete, or failed."""
        for job in ended:
            if job in self._gone:  # its client went away during the turn that ended it
                self._gone.remove(job)
                continue
            tokens = self._running.pop(job, None)
            if tokens is None:  # failed while its prompt was read
                self._reading = None
            elif tokens:
                used = min(1.0, tokens / max(job.answer, 1))
                self.share = FORGET * self.share + (1 - FORGET) * used

    def cancel(self, job: Job) -> bool:
        """Nobody waits for this job any more: its slot is free at the next turn. Whether it waited
        for one, so that no turn will name it."""
        if job in self._queued:
            self._remove(job)
            return True
        if job in self._running:
            del self._running[job]
            self._gone.append(job)
        elif self._reading is not None and self._reading[0] is job:
            self._reading = None
            self._gone.append(job)
        return False

    def drain(self) -> None:
        """Accept nothing more; what was accepted is answered."""
        self.draining = True

    def _read(self, tokens: int) -> float:
        """Seconds until a prompt is read, with the steps between its pieces."""
        count = -(-tokens // self.limits.piece)
        between = self._costs.step(len(self._running)) if self._running else 0.0
        return self._costs.read(tokens) + max(count - 1, 0) * between

    def _cost(self, job: Job) -> float:
        """Seconds of the worker that a job takes from the others."""
        step = self._costs.step(self.limits.slots) / self.limits.slots
        return self._costs.read(job.prompt) + self.share * job.answer * step

    def _wait(self) -> float:
        """Predicted seconds until the last of those that wait has its slot."""
        ahead = sum(self._queued.values())
        if self._reading is not None:
            job, parts = self._reading
            ahead += self._read(job.prompt - parts[0][0])
        if self.active < self.limits.slots or not self._running:
            return ahead
        left = min(max(self.share * j.answer - n, 1.0) for j, n in self._running.items())
        return ahead + left * self._costs.step(len(self._running))

    def _refuse(self, jobs: Sequence[Job]) -> None:
        wait = self._wait()
        if self.draining:
            raise Refused("draining", wait)
        if len(self._queued) + len(jobs) > max(self.limits.waiting, self.limits.slots):
            raise Refused("overload", wait)
        if not self._queued or wait <= self.limits.wait:
            return
        client = jobs[0].client
        sharing = len(self._shares) + (client not in self._shares)
        share = self._shares.get(client, 0.0)  # without its own cost: `check` does not know that
        if wait > 2 * self.limits.wait or share > self.limits.wait / sharing:
            raise Refused("overload", wait - self.limits.wait)

    def _add(self, job: Job, cost: float) -> None:
        self._number += 1
        start = max(self._virtual, self._tags.get(job.client, 0.0))
        self._tags[job.client] = start + cost
        self._queued[job] = cost
        heapq.heappush(self._waiting, ((job.priority, start, self._number), job))
        self._clients[job.client] += 1
        self._shares[job.client] = self._shares.get(job.client, 0.0) + cost

    def _next(self) -> Job | None:
        """The first in the order, which waits no more."""
        while self._waiting:
            (_, start, _), job = heapq.heappop(self._waiting)
            if job in self._queued:
                self._virtual = max(self._virtual, start)
                self._remove(job)
                return job
        return None

    def _remove(self, job: Job) -> None:
        self._shares[job.client] -= self._queued.pop(job)
        self._clients[job.client] -= 1
        if not self._clients[job.client]:
            del self._clients[job.client], self._shares[job.client], self._tags[job.client]
        if not self._queued:
            self._waiting.clear()

    def _expire(self, now: float, turn: Turn) -> None:
        late = [j for j in self._queued if now + self._costs.read(j.prompt) > j.first]
        for job in late:
            self._remove(job)
        slow = [j for j in self._running if now > j.deadline]
        for job in slow:
            del self._running[job]
        if self._reading is not None and now > min(
            self._reading[0].first, self._reading[0].deadline
        ):
            slow.append(self._reading[0])
            self._reading = None
        turn.expired = [*late, *slow]
