"""Summarize the replies of a run in percentiles, rates and a verdict on objectives.

latency       time from due to the end of the answer
first_token   time from due to the first piece of a streamed answer
between       time from one piece to the next

**Intervals.** Latencies of neighbouring requests depend on each other through the queue, so an
interval that assumes independence is too narrow. The run is cut into WINDOWS of equal time.
Windows are drawn with replacement, DRAWS times, and the percentile is taken of all requests in the
drawn windows (a block bootstrap: Kuensch 1989, Annals of Statistics 17). A window must be longer
than a request takes: where the slowest answer took longer than a window, both ends are unknown
(None). So is the upper end of a percentile that the run has too few requests to bound.
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
from optimizer.load_test.open_loop import REFUSED, Reply

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
WINDOWS, DRAWS = 20, 1000
Floats = npt.NDArray[np.float64]

TIMES = ("latency", "first_token", "between")
RESULTS = ("answered", "refused", "wrong", "lost")


def summarize_run(
    replies: Sequence[Reply],
    expected: Sequence[str],
    seconds: float,
    limits: Mapping[str, float],
) -> dict[str, Any]:
    """Summarize a run of a load test: counts, percentiles of times in ms, rates per second. Goodput
    counts the right answers of which every time is within its limit.

    expected: answer to the input of each reply when sent alone
    seconds: length of the run
    limits: {kind of time, of TIMES: limit in ms}
    """
    results = [_classify(r, answer) for r, answer in zip(replies, expected, strict=True)]
    right, refused = (
        [r for r, result in zip(replies, results, strict=True) if result == name]
        for name in ("answered", "refused")
    )
    late = [1000 * (r.sent - r.due) for r in replies]
    lasted = max([seconds, *(r.ended for r in right)])
    return {
        "sent": len(replies),
        **{result: results.count(result) for result in RESULTS},
        "reasons": dict(Counter(r.lost or str(r.status) for r in replies if r.status != 200)),
        "throughput": len(right) / lasted,
        "goodput": sum(_within_all(r, limits) for r in right) / lasted,
        "client_late_ms": float(np.percentile(late, 99)) if late else 0.0,
        **{kind: _percentiles(right, kind, seconds) for kind in TIMES},
        "refused_in": _percentiles(refused, "latency", seconds),
    }


def _classify(reply: Reply, expected: str) -> str:
    if reply.lost or reply.status not in (200, *REFUSED):
        return "lost"
    if reply.status in REFUSED:
        return "refused"
    return "answered" if reply.answer == expected else "wrong"


def _within_all(reply: Reply, limits: Mapping[str, float]) -> bool:
    return all(t <= limit for kind, limit in limits.items() for t in list_times(reply, kind))


def list_times(reply: Reply, kind: str) -> list[float]:
    """Return the times of one reply in a load test, of a kind in ms; [] for a reply in one piece,
    except "latency"."""
    if kind == "latency":
        return [1000 * (reply.ended - reply.due)]
    if kind == "first_token":
        return [1000 * (reply.pieces[0] - reply.due)] if len(reply.pieces) > 1 else []
    return [1000 * (b - a) for a, b in itertools.pairwise(reply.pieces)]


def _percentiles(
    replies: Sequence[Reply], kind: str, seconds: float
) -> dict[str, list[float | None]]:
    """Compute for a load test {"p99": [value, low, high], ...}, in ms, for each of PERCENTILES; {}
    if no reply has a time of that kind."""
    windows: list[list[float]] = [[] for _ in range(WINDOWS)]
    for reply in replies:
        windows[min(int(reply.due / seconds * WINDOWS), WINDOWS - 1)] += list_times(reply, kind)
    values = np.array([t for window in windows for t in window])
    if not len(values):
        return {}
    longest = max(r.ended - r.due for r in replies)
    drawn = _bootstrap(windows) if longest <= seconds / WINDOWS else None
    figures: dict[str, list[float | None]] = {}
    for percent in PERCENTILES:
        ends: list[float | None] = [None, None]
        if drawn is not None:
            tails = np.percentile(drawn[percent], [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
            ends = [float(tails[0]), float(tails[1]) if len(values) >= fewest(percent) else None]
        figures[f"p{percent:g}"] = [float(np.percentile(values, percent)), *ends]
    return figures


def _bootstrap(windows: Sequence[Sequence[float]]) -> dict[float, Floats]:
    """Bootstrap a load test's percentiles: {percent: its percentile in each of DRAWS draws of
    windows}."""
    generator, parts = np.random.default_rng(0), [np.array(w) for w in windows]
    drawn = np.empty((DRAWS, len(PERCENTILES)))
    for row in drawn:
        values = np.empty(0)
        while not len(values):  # a draw of empty windows has no percentile
            chosen = generator.integers(0, len(parts), len(parts))
            values = np.concatenate([parts[i] for i in chosen])
        row[:] = np.percentile(values, PERCENTILES)
    return dict(zip(PERCENTILES, drawn.T, strict=True))


def judge_figures(
    figures: Mapping[str, Any], limits: Mapping[str, float], max_refused: float
) -> Verdict:
    """Judge figures of `summarize_run`: pass if the 99th percentile of each kind is in its limit
    (ms), at most the share `max_refused` was refused, and every other request was answered right.
    Inconclusive if the interval of a percentile contains the limit or is unknown (a short run)."""
    if figures["wrong"] or figures["lost"] or not figures["answered"]:
        return "fail"
    if figures["refused"] > max_refused * figures["sent"]:
        return "fail"
    each = [judge_percentile(figures[kind].get("p99"), limit) for kind, limit in limits.items()]
    return "fail" if "fail" in each else "inconclusive" if "inconclusive" in each else "pass"


def judge_percentile(p99: Sequence[float | None] | None, limit: float) -> Verdict:
    """Judge a load test's 99th percentile, [value, low, high] in ms; None (no answer) is
    inconclusive."""
    if p99 is None:
        return "inconclusive"
    value, low, high = p99
    assert value is not None
    if low is not None and low > limit:
        return "fail"
    if low is None and high is None and value > limit:  # one answer took longer than a window
        return "fail"
    return "pass" if high is not None and high <= limit else "inconclusive"
