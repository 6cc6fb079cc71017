"""From what became of each request to figures, and to a verdict on objectives.

latency       from due to the end of the answer
first_token   from due to its first piece, where it comes in pieces
between       from one piece to the next

**Intervals.** Latencies of neighbouring requests depend on each other through the queue, so that an
interval that takes them for independent is too narrow. The run is cut into WINDOWS of equal time;
windows are drawn with replacement, DRAWS times, and the percentile taken of all requests in those
drawn (a block bootstrap: Kuensch 1989, Annals of Statistics 17). A window must be long beside what
a request waits: where the slowest answer took longer than a window, the ends are unknown (None).
So is the end above of a percentile that no request of the run bounds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from optimizer.foundation.verdicts import Verdict
from optimizer.harness.bounds import CONFIDENCE, fewest
from optimizer.load_test.open_loop import REFUSED, Outcome

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
WINDOWS, DRAWS = 20, 1000
Floats = npt.NDArray[np.float64]

TIMES = ("latency", "first_token", "between")
RESULTS = ("answered", "refused", "wrong", "lost")


def of_run(
    outcomes: Sequence[Outcome],
    expected: Sequence[str],
    seconds: float,
    limits: Mapping[str, float],
) -> dict[str, Any]:
    """What became of the requests of a run of so many seconds. expected: the answer to each, asked
    alone. limits: {kind of time: ms}. Times in ms, rates per second; goodput counts right answers
    each of whose times lies within its limit."""
    results = [_result(o, answer) for o, answer in zip(outcomes, expected, strict=True)]
    right, refused = (
        [o for o, result in zip(outcomes, results, strict=True) if result == name]
        for name in ("answered", "refused")
    )
    late = [1000 * (o.sent - o.due) for o in outcomes]
    lasted = max([seconds, *(o.ended for o in right)])
    return {
        "sent": len(outcomes),
        **{result: results.count(result) for result in RESULTS},
        "reasons": dict(Counter(o.lost or str(o.status) for o in outcomes if o.status != 200)),
        "throughput": len(right) / lasted,
        "goodput": sum(_within_all(o, limits) for o in right) / lasted,
        "client_late_ms": float(np.percentile(late, 99)) if late else 0.0,
        **{kind: _percentiles(right, kind, seconds) for kind in TIMES},
        "refused_in": _percentiles(refused, "latency", seconds),
    }


def _result(outcome: Outcome, expected: str) -> str:
    if outcome.lost or outcome.status not in (200, *REFUSED):
        return "lost"
    if outcome.status in REFUSED:
        return "refused"
    return "answered" if outcome.answer == expected else "wrong"


def _within_all(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    return all(t <= limit for kind, limit in limits.items() for t in times(outcome, kind))


def times(outcome: Outcome, kind: str) -> list[float]:
    """Of one request, in ms."""
    if kind == "latency":
        return [1000 * (outcome.ended - outcome.due)]
    if kind == "first_token":
        return [1000 * (outcome.pieces[0] - outcome.due)] if len(outcome.pieces) > 1 else []
    pieces = outcome.pieces
    return [1000 * (b - a) for a, b in itertools.pairwise(pieces)]


def _percentiles(
    outcomes: Sequence[Outcome], kind: str, seconds: float
) -> dict[str, list[float | None]]:
    """{"p99": [value, low, high]}"""
    windows: list[list[float]] = [[] for _ in range(WINDOWS)]
    for outcome in outcomes:
        windows[min(int(outcome.due / seconds * WINDOWS), WINDOWS - 1)] += times(outcome, kind)
    values = np.array([t for window in windows for t in window])
    if not len(values):
        return {}
    longest = max(o.ended - o.due for o in outcomes)
    drawn = _drawn(windows) if longest <= seconds / WINDOWS else None
    figures: dict[str, list[float | None]] = {}
    for percent in PERCENTILES:
        ends: list[float | None] = [None, None]
        if drawn is not None:
            tails = np.percentile(drawn[percent], [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
            ends = [float(tails[0]), float(tails[1]) if len(values) >= fewest(percent) else None]
        figures[f"p{percent:g}"] = [float(np.percentile(values, percent)), *ends]
    return figures


def _drawn(windows: Sequence[Sequence[float]]) -> dict[float, Floats]:
    """{percent: the percentile in each draw}"""
    generator, parts = np.random.default_rng(0), [np.array(w) for w in windows]
    drawn = np.empty((DRAWS, len(PERCENTILES)))
    for row in drawn:
        values = np.empty(0)
        while not len(values):  # a draw of empty windows alone says nothing
            chosen = generator.integers(0, len(parts), len(parts))
            values = np.concatenate([parts[i] for i in chosen])
        row[:] = np.percentile(values, PERCENTILES)
    return dict(zip(PERCENTILES, drawn.T, strict=True))


def verdict(figures: Mapping[str, Any], limits: Mapping[str, float], refusals: float) -> Verdict:
    """Whether the 99th percentile of each kind lies within its limit (ms), at most the share
    `refusals` was refused, and every other request was answered right.

    inconclusive: an interval has the limit inside, or the run was too short to bound it.
    """
    if figures["wrong"] or figures["lost"] or not figures["answered"]:
        return "fail"
    if figures["refused"] > refusals * figures["sent"]:
        return "fail"
    each = [within(figures[kind].get("p99"), limit) for kind, limit in limits.items()]
    return "fail" if "fail" in each else "inconclusive" if "inconclusive" in each else "pass"


def within(p99: Sequence[float | None] | None, limit: float) -> Verdict:
    """p99: [value, low, high], see of_run; None: nothing was answered."""
    if p99 is None:
        return "inconclusive"
    value, low, high = p99
    assert value is not None
    if low is not None and low > limit:
        return "fail"
    if low is None and high is None and value > limit:  # one answer took longer than a window
        return "fail"
    return "pass" if high is not None and high <= limit else "inconclusive"
