"""Statistics of one model, as Triton's statistics extension defines them. On the event loop.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
Preparing inputs and reading outputs of a batch is part of the run here, so batch_stats has only
compute_infer. A cache that does not hold an answer is counted, and its lookup is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

PHASES = ("compute_input", "queue", "compute_infer", "compute_output")
NAMES = ("success", "fail", *PHASES, "cache_hit", "cache_miss")


@dataclass
class Duration:
    """Statistic of a server: number of events and their total duration.

    ns: total in nanoseconds
    """

    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += max(0, round(1e9 * seconds))


class Statistics:
    """A server's statistics of one model of a version."""

    def __init__(self) -> None:
        self._last = self._rows = self._runs = 0
        self._requests = {name: Duration() for name in NAMES}
        self._batches: dict[int, Duration] = {}

    def record_run(self, rows: int, seconds: float) -> None:
        """Count a run of the served model.

        rows: rows of its batch
        """
        self._runs += 1
        self._batches.setdefault(rows, Duration()).add(seconds)

    def count_answered(self, instants: Sequence[float], rows: int, cache: bool | None) -> None:
        """Count an answered request.

        instants: times in seconds: start and end of the request; if the model ran, also between
            its PHASES
        rows: number of rows that the model answered
        cache: True if a cache gave the answer, False if it had none; None without a cache
        """
        requests, seconds = self._requests, instants[-1] - instants[0]
        self._last = int(1000 * time.time())
        requests["success"].add(seconds)
        if cache:
            requests["cache_hit"].add(seconds)
        elif cache is not None:
            requests["cache_miss"].add(0.0)
        if len(instants) > 2:
            self._rows += rows
            for name, (start, end) in zip(PHASES, pairwise(instants), strict=True):
                requests[name].add(end - start)

    def count_failed(self, seconds: float) -> None:
        """Count a server's request that was not answered."""
        self._requests["fail"].add(seconds)

    def document(self, name: str, version: str) -> dict[str, Any]:
        """Return the entry of the served model in Triton's model_stats."""
        return {
            "name": name,
            "version": version,
            "last_inference": self._last,
            "inference_count": self._rows,
            "execution_count": self._runs,
            "inference_stats": {n: asdict(d) for n, d in self._requests.items()},
            "batch_stats": [
                {"batch_size": rows, "compute_infer": asdict(duration)}
                for rows, duration in sorted(self._batches.items())
            ],
        }
