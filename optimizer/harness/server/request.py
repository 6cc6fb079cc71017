"""A request over HTTP or gRPC, from its arrival to its log line, metrics and spans."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .observe.metrics import Metrics

HIT, MISS = "hit", "miss"  # values of Result.cache
ANSWERED = (200, "OK")  # statuses of an answer


@dataclass(frozen=True)
class Times:
    """Times of a server's request, in seconds of time.monotonic.

    These are its acceptance, the start of its first batch or slot, and the end of its last batch or
    decode step.
    """

    submitted: float
    begun: float
    ended: float

    @property
    def model(self) -> float:
        """Return the seconds that a request spent in the model, without those in the queue."""
        return self.ended - self.begun


@dataclass
class Result:
    """A server's answers to a request.

    answers: one per row
    truncated: number of rows that were cut to the model's longest input
    tokens: number of tokens of all rows
    queued, model: seconds in the queue and in the model, maximum over rows
    times: Times of the request; None if the model did not run
    cache: HIT, MISS or another source of the answers; "" without a cache
    rows: number of rows that the model answered
    lengths: tokens of each row that the model read, after truncation; of generated texts those of
        the prompt; () for inputs without a length
    batch: rows of the largest batch in which a row was run; 0 for generated texts
    """

    answers: list[Any]
    truncated: int = 0
    tokens: int = 0
    queued: float = 0.0
    model: float = 0.0
    times: Times | None = None
    cache: str = ""
    rows: int = 1
    lengths: tuple[int, ...] = ()
    batch: int = 0


@dataclass(eq=False)
class QueuePlace:
    """Place in the server's queue of a request that was admitted before its body is read. The
    caller closes it.

    client: address of the client
    leave: function that `close` calls
    open: False once the request was submitted or the place given up
    """

    client: str
    leave: Callable[[QueuePlace], None]
    open: bool = True

    def close(self) -> None:
        """Free the place in the queue, unless its request has been submitted."""
        self.leave(self)


@dataclass(kw_only=True)
class Request:
    """
    headers: HTTP's headers, or gRPC's metadata
    client: address of the client
    route: template of the path or method for logs and errors; never the path itself, which a
        client writes
    start, end: seconds by time.monotonic
    status: HTTP's status, or the name of gRPC's status code
    deadline: deadline of the answer; in text generation, of the first token
    last: deadline of a text's last token
    priority: rank; lower runs first
    place: place in the queue; None before the request is admitted
    model, version, metrics: of the model that answers: name, version, metrics; see Service.take
    result: Result, complete once the whole answer is sent; None without an answer
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    client: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    route: str = "unknown"
    start: float = field(default_factory=time.monotonic)
    end: float = 0.0
    status: int | str = ""
    deadline: float = math.inf
    last: float = math.inf
    priority: int = 0
    place: QueuePlace | None = None
    model: str = ""
    version: str = ""
    metrics: Metrics | None = None
    result: Result | None = None

    def count(self) -> None:
        """Count the answered request among the metrics and statistics of its model."""
        result, metrics = self.result, self.metrics
        if result is None or metrics is None or self.status not in ANSWERED:
            return
        metrics.request.observe(self.end - self.start)
        t = result.times
        inner = () if t is None else (t.submitted, t.begun, t.ended)
        cache = result.cache != MISS if result.cache else None
        instants = (self.start, *inner, self.end)
        metrics.statistics[self.model].count_answered(instants, result.rows, cache)
        metrics.count_traffic(result.lengths, result.answers)

    @property
    def counts(self) -> dict[str, Any]:
        """Return {field of a log line: number about the answer}; {} without an answer."""
        result = self.result
        if result is None:
            return {}
        return {
            "tokens": result.tokens,
            "queue_ms": round(1000 * result.queued, 3),
            "model_ms": round(1000 * result.model, 3),
            "truncated": result.truncated,
            **({"lengths": list(result.lengths)} if result.lengths else {}),
            **({"batch": result.batch} if result.batch else {}),
            **({"cache": result.cache} if result.cache else {}),
        }
