"""Scheduler of text generation in slots: the next prefill piece or decode step, and refusals.

    scheduler.submit(now, jobs)           all accepted, or Refused is raised, at once
    step = scheduler.schedule(now)        for a free worker: a piece of a prompt, or one decode step
    scheduler.postprocess(finished)       the step is done; these texts are complete

Pure: it has no clock, no thread and no model. Called by decoding.py. Times are seconds on any clock
that does not go back.

Slots      A text has a slot from the first piece of its prompt to its last token, and with it KV
           cache for all the tokens that it may have: nothing that runs is preempted for memory.
Steps      A piece of one prompt, then one token of all running texts, then a piece again (chunked
           prefill): a text joins the running ones as soon as its prompt is read, and running texts
           wait for one piece between two tokens.
Order      fair_queue.py: priority, then fairness among clients.
Deadlines  Of the first token, and of the whole answer. A job that is predicted to miss the first is
           refused at once; a text that misses either is ended and its slot is free.
Overload   No more jobs wait than are predicted to begin within `wait` seconds; a client with less
           than its share of the queue may wait twice as long.

The length of an answer is unknown: it is predicted as the recent average share of the tokens that
answers may have. A cached prefix (prefix_cache.py) is looked up when a job gets its slot; until
then the whole prompt is predicted to be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .fair_queue import FairQueue, Job, Refused

EMA_DECAY = 0.9  # weight of the old estimate of `share` at each answer that ends


@dataclass(frozen=True)
class SlotLimits:
    """Limits of a server's SlotScheduler.

    slots: maximum texts that run at once
    waiting: maximum texts in the queue
    wait: maximum predicted seconds until the first token
    piece: tokens of a prompt that one step reads
    """

    slots: int
    waiting: int
    wait: float
    piece: int


@dataclass(frozen=True)
class SlotCosts:
    """Predicted seconds of a server's steps of text generation.

    prefill(tokens): seconds to read a piece of a prompt
    decode(texts): seconds of one token of each text
    """

    prefill: Callable[[int], float]
    decode: Callable[[int], float]


@dataclass(eq=False)
class GenerationJob(Job):
    """One text to generate for a request, which the server schedules.

    prompt: number of prompt tokens
    answer: maximum number of new tokens
    first: deadline of the first token; `deadline` is the deadline of the last token
    """

    prompt: int
    answer: int
    first: float = field(default=math.inf, kw_only=True)


J = TypeVar("J", bound=GenerationJob)


@dataclass
class ScheduledStep(Generic[J]):
    """Decision of `SlotScheduler.schedule`; neither prefill nor decode where nothing is to run.

    prefill: job and the tokens start..stop of its prompt to read
    decode: jobs that get one token each
    expired: accepted jobs whose time is up; their slots are free
    aborted: jobs that had a slot and whose client has left; their slots are free
    """

    prefill: tuple[J, int, int] | None = None
    decode: list[J] = field(default_factory=list)
    expired: list[J] = field(default_factory=list)
    aborted: list[J] = field(default_factory=list)

    @property
    def jobs(self) -> list[J]:
        """Return the jobs of this step of the server that the model runs for."""
        return self.decode if self.prefill is None else [self.prefill[0]]


def cut_pieces(length: int, size: int, loop_size: int) -> list[tuple[int, int]]:
    """Cut, for a server's steps, a prompt of `length` tokens into pieces of about `size` tokens:
    [(start, stop)].

    A prompt is cut at every multiple of `loop_size` too, where `predict` cuts it. No piece has one
    token unless `predict` has such a piece: kernels for one row and for several rows differ.
    """
    parts = []
    for first in range(0, length, loop_size):
        last = min(first + loop_size, length)
        start = first
        while start < last:
            stop = min(start + size, last)
            stop = last if last - stop == 1 else stop
            parts.append((start, stop))
            start = stop
    return parts


class SlotScheduler(Generic[J]):
    """Chooses the next run of the model over a server's slots: a piece of a prompt, or one token of
    each text. Refuses requests that would miss their limits (rules in this file's docstring).

    loop_size: tokens of a prompt that the loop of `predict` reads at once (generate/loop.py);
        pieces of that size give its bits (`cut_pieces`)
    cached: function from a job to the number of its prompt tokens in prefix_cache.py; None: no
        cache
    """

    def __init__(
        self,
        limits: SlotLimits,
        costs: SlotCosts,
        loop_size: int,
        cached: Callable[[J], int] | None = None,
    ) -> None:
        self.limits, self._costs, self._loop_size = limits, costs, loop_size
        self.cached = cached
        self.draining = False
        self.share = 1.0  # recent average of the share of its allowed tokens that an answer takes
        self.waiting: FairQueue[J] = FairQueue()
        self.prefilling: tuple[J, list[tuple[int, int]]] | None = None  # and its pieces left
        self.running: dict[J, int] = {}  # number of tokens so far
        self._aborted: list[J] = []  # have a slot until the next step
        self._decoded = True  # the last step was not a prefill

    def __len__(self) -> int:
        """Jobs that wait or run."""
        return len(self.waiting) + self.active

    @property
    def active(self) -> int:
        """Number of slots of the KV cache that texts use now."""
        return len(self.running) + (self.prefilling is not None)

    def check(self, client: str) -> None:
        """Raise Refused if `submit` would refuse every request of this client now."""
        self._refuse(client, 1)

    def submit(self, now: float, jobs: Sequence[J]) -> None:
        """Accept all jobs of one request into the server's queue, or raise Refused for all of
        them."""
        self._refuse(jobs[0].client, len(jobs))
        begins = now + self._wait()
        for job in jobs:
            begins += self._prefill_seconds(job.prompt)
            if begins > job.first:
                raise Refused("deadline", self._wait())
        costs = [self._seconds(job) for job in jobs]
        for job, cost in zip(jobs, costs, strict=True):
            self.waiting.push(now, job, cost)

    def schedule(self, now: float) -> ScheduledStep[J]:
        """Choose the server's next step for a free worker; `postprocess` must follow."""
        step = ScheduledStep[J](aborted=self._aborted)
        self._aborted = []
        self._expire(now, step)
        if self.prefilling is None and self.active < self.limits.slots and self.waiting:
            (job,) = self.waiting.front()
            self.waiting.start([job])
            parts = cut_pieces(job.prompt, self.limits.piece, self._loop_size)
            cached = self.cached(job) if self.cached is not None else 0
            self.prefilling = (job, [part for part in parts if part[0] >= cached])
        if self.prefilling is not None and (self._decoded or not self.running):
            job, parts = self.prefilling
            step.prefill = (job, *parts.pop(0))
            if not parts:
                self.prefilling, self.running[job] = None, 0
        else:
            step.decode = list(self.running)
        self._decoded = step.prefill is None
        for job in step.jobs:
            if job in self.running:
                self.running[job] += 1
        return step

    def postprocess(self, finished: Collection[J]) -> None:
        """Free the server's slots of jobs that ended with the step.

        finished: jobs that are complete, or failed
        """
        for job in finished:
            if job in self._aborted:  # its client left during the step that finished it
                self._aborted.remove(job)
                continue
            tokens = self.running.pop(job, None)
            if tokens is None:  # failed while its prompt was read
                self.prefilling = None
            elif tokens:
                used = min(1.0, tokens / max(job.answer, 1))
                self.share = EMA_DECAY * self.share + (1 - EMA_DECAY) * used

    def abort(self, job: J) -> bool:
        """Drop a job whose client has left; its slot is free at the next step.

        Returns True if it waited without a slot, so that no step will name it.
        """
        if job in self.waiting:
            self.waiting.remove(job)
            return True
        if job in self.running:
            del self.running[job]
            self._aborted.append(job)
        elif self.prefilling is not None and self.prefilling[0] is job:
            self.prefilling = None
            self._aborted.append(job)
        return False

    def drain(self) -> None:
        """Refuse new requests, because the server ends; accepted jobs still run."""
        self.draining = True

    def _prefill_seconds(self, tokens: int) -> float:
        """Predict for the scheduler the seconds to read a prompt, with the decode steps between its
        pieces."""
        count = -(-tokens // self.limits.piece)
        between = self._costs.decode(len(self.running)) if self.running else 0.0
        return self._costs.prefill(tokens) + max(count - 1, 0) * between

    def _seconds(self, job: J) -> float:
        """Predict the seconds for which a request's job keeps the model from other jobs."""
        step = self._costs.decode(self.limits.slots) / self.limits.slots
        return self._costs.prefill(job.prompt) + self.share * job.answer * step

    def _wait(self) -> float:
        """Predict the seconds until the server's last waiting job gets its slot."""
        ahead = self.waiting.seconds()
        if self.prefilling is not None:
            job, parts = self.prefilling
            ahead += self._prefill_seconds(job.prompt - parts[0][0])
        if self.active < self.limits.slots or not self.running:
            return ahead
        left = min(max(self.share * j.answer - n, 1.0) for j, n in self.running.items())
        return ahead + left * self._costs.decode(len(self.running))

    def _refuse(self, client: str, jobs: int) -> None:
        """Raise Refused if a request of `jobs` jobs is refused whatever its jobs cost."""
        wait = self._wait()
        if self.draining:
            raise Refused("draining", wait)
        if len(self.waiting) + jobs > max(self.limits.waiting, self.limits.slots):
            raise Refused("overload", wait)
        if self.waiting:
            self.waiting.refuse_overload(client, wait, self.limits.wait)

    def _expire(self, now: float, step: ScheduledStep[J]) -> None:
        late = [j for j in self.waiting if now + self._costs.prefill(j.prompt) > j.first]
        for job in late:
            self.waiting.remove(job)
        slow = [j for j in self.running if now > j.deadline]
        for job in slow:
            del self.running[job]
        if self.prefilling is not None:
            job = self.prefilling[0]
            if now > min(job.first, job.deadline):
                slow.append(job)
                self.prefilling = None
        step.expired = [*late, *slow]
