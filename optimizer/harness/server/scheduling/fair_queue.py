"""Queue of jobs in fair order, under both schedulers (batching.py, slots.py).

Priority first; within one priority, clients share the worker evenly (start-time fair queueing:
Goyal, Vin, Cheng 1996), so a flood of one client delays the others by little. Jobs are queued with
the seconds that the model is predicted to take for them. Not safe for threads: its scheduler's
owner holds a lock.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar


class Refused(Exception):
    """Error of a request that the server's scheduler does not accept.

    reason: "overload", "deadline" or "draining"
    retry_after: seconds until it may be accepted
    """

    def __init__(self, reason: str, retry_after: float) -> None:
        super().__init__(reason)
        self.reason, self.retry_after = reason, retry_after


@dataclass(eq=False, kw_only=True)
class Job:
    """Unit of work of a request, while it waits and runs.

    bucket: key that jobs of one batch share
    priority: rank; lower runs first
    deadline: time by which the answer must be ready; in text generation, the last token
    arrived, seconds, order: arrival, predicted seconds of the model, sort key; set by push
    """

    bucket: Hashable = None
    client: str = ""
    priority: int = 0
    deadline: float = math.inf
    rows: int = 1
    arrived: float = field(default=0.0, init=False)
    seconds: float = field(default=0.0, init=False)
    order: tuple[int, float, int] = field(default=(0, 0.0, 0), init=False)


J = TypeVar("J", bound=Job)


class FairQueue(Generic[J]):
    """Server's queue of requests' jobs, first by priority, then fairly among clients."""

    def __init__(self) -> None:
        self._jobs: dict[J, None] = {}
        self._buckets: dict[Hashable, list[tuple[tuple[int, float, int], J]]] = {}
        """Heaps, which may hold jobs that were removed."""
        self._rows: Counter[int] = Counter()  # by priority
        self._seconds: dict[int, float] = {}  # by priority
        self._client_jobs: Counter[str] = Counter()
        self._client_seconds: dict[str, float] = {}
        self._next_start: dict[str, float] = {}  # virtual time at which a client's next job starts
        self._virtual_time = 0.0
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: object) -> bool:
        return job in self._jobs

    def __iter__(self) -> Iterator[J]:
        return iter(self._jobs)

    @property
    def rows(self) -> int:
        """Return the number of rows that wait in the server's queue."""
        return self._rows.total()

    def seconds(self, priority: float = math.inf) -> float:
        """Return the predicted seconds of queued jobs with this priority or a lower number; by
        default of all."""
        return sum(seconds for p, seconds in self._seconds.items() if p <= priority)

    def push(self, now: float, job: J, seconds: float) -> None:
        """Add a request's job to the server's queue.

        seconds: predicted seconds of the model for the job
        """
        self._pushed += 1
        start = max(self._virtual_time, self._next_start.get(job.client, 0.0))
        self._next_start[job.client] = start + seconds
        job.arrived, job.seconds, job.order = now, seconds, (job.priority, start, self._pushed)
        self._jobs[job] = None
        heapq.heappush(self._buckets.setdefault(job.bucket, []), (job.order, job))
        self._rows[job.priority] += job.rows
        self._seconds[job.priority] = self._seconds.get(job.priority, 0.0) + seconds
        self._client_jobs[job.client] += 1
        self._client_seconds[job.client] = self._client_seconds.get(job.client, 0.0) + seconds

    def remove(self, job: J) -> None:
        """Take a job out of the server's queue, without running it."""
        del self._jobs[job]
        self._rows[job.priority] -= job.rows
        self._seconds[job.priority] -= job.seconds
        self._client_jobs[job.client] -= 1
        self._client_seconds[job.client] -= job.seconds
        if not self._rows[job.priority]:
            del self._rows[job.priority], self._seconds[job.priority]
        if not self._client_jobs[job.client]:
            del self._client_jobs[job.client], self._client_seconds[job.client]
            del self._next_start[job.client]
        if not self._jobs:
            self._buckets.clear()

    def front(self, rows: int = 1) -> list[J]:
        """Return the queue's first job, and further jobs of its bucket, up to `rows` rows; [] if
        none waits."""
        for bucket in list(self._buckets):
            heap = self._buckets[bucket]
            while heap and heap[0][1] not in self._jobs:
                heapq.heappop(heap)
            if not heap:
                del self._buckets[bucket]
        if not self._buckets:
            return []
        heap = min(self._buckets.values(), key=lambda h: h[0][0])
        entries, total = list[tuple[tuple[int, float, int], J]](), 0
        while heap:
            job = heap[0][1]
            if job in self._jobs:
                if entries and total + job.rows > rows:
                    break
                entries.append(heap[0])
                total += job.rows
            heapq.heappop(heap)
        for entry in entries:  # the caller may run fewer of them, or others
            heapq.heappush(heap, entry)
        return [job for _, job in entries]

    def start(self, jobs: Sequence[J]) -> None:
        """Take jobs that run now out of the queue. Virtual time, by which clients share the model
        fairly, advances to the first job's start."""
        self._virtual_time = max(self._virtual_time, jobs[0].order[1])
        for job in jobs:
            self.remove(job)

    def refuse_overload(
        self,
        client: str,
        wait: float,
        limit: float,
        *,
        arriving: Collection[str] = (),
        arriving_seconds: float = 0.0,
        admitted: bool = False,
    ) -> None:
        """Raise Refused where a request would wait longer than `limit` seconds.

        A client with less than its share of the queue may wait twice as long, and so may a request
        that was admitted before.

        wait: predicted seconds until the request would start
        arriving: clients of admitted requests that are still being read
        arriving_seconds: predicted seconds of this client's arriving requests
        """
        if wait <= limit:
            return
        share = self._client_seconds.get(client, 0.0) + arriving_seconds
        clients = len(self._client_seconds.keys() | {*arriving, client})
        if wait > 2 * limit or (share > limit / clients and not admitted):
            raise Refused("overload", wait - limit)
