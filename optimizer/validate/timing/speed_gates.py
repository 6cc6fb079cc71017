"""Verdicts of the speed gates, from measured ratios and percentiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optimizer.recipe.schema import Latency
from optimizer.validate.gates import UNMEASURED, Gate
from optimizer.validate.ledger.breach import write_breach

BASELINE = "onnxruntime-float"
LONGEST = 86_400  # seconds of timing that a message proposes


def count_questions(latency: Latency, cells: int, gain: bool = False) -> int:
    """Count the gates that share latency.max_seconds: one per cell for must_beat_float, one for
    p99_ms and one for a latency gain.

    cells: number of timed cells
    gain: True where the recipe asks for a latency gain
    """
    return cells * latency.must_beat_float + (latency.p99_ms is not None) + gain


def list_unmeasured(
    latency: Latency, why: str, gain: tuple[str, float] | None = None
) -> list[Gate]:
    """List the recipe's speed gates with the verdict "not measured", where nothing could be timed.

    why: reason, for the message
    gain: (name, limit) of the gate of a latency gain; None: the recipe asks for none
    """
    declared = [("speed.must_beat_float", 1.0)] if latency.must_beat_float else []
    if latency.p99_ms is not None:
        declared.append(("speed.p99_ms", latency.p99_ms))
    declared += [gain] if gain else []
    return [Gate(name, UNMEASURED, None, limit, None, why) for name, limit in declared]


def judge_float(
    cells: Sequence[tuple[str, Mapping[str, Any]]],
    why: Callable[[int], str],
    what: str = "time",
    shared: int = 1,
) -> Gate:
    """Judge must_beat_float by the worst cell, whose interval reaches highest.

    cells: (place, ratio to float with its interval) per cell
    why: function: index of a cell -> explanation of why it is slower
    what: name of the time in the message
    shared: number of questions that share latency.max_seconds (count_questions)
    """
    intervals = [ratio["interval"] for _, ratio in cells]
    worst = max(range(len(cells)), key=lambda i: _upper(intervals[i]))
    verdict = "pass" if _upper(intervals[worst]) < 1 else "inconclusive"
    if any(low is not None and low >= 1 for low, _ in intervals):
        verdict = "fail"
        worst = max(range(len(cells)), key=lambda i: intervals[i][0] or 0.0)
    where, comparison = cells[worst]
    ratio = comparison["median"]
    baseline = comparison.get("to", BASELINE)
    message = f"{write_breach(ratio, 1.0)[0]} times the {what} of {baseline} at {where}"
    if verdict == "inconclusive":
        message += describe_undecided(comparison, shared, "so near 1")
    if verdict == "fail":
        message += f"; {why(worst)}"
    low, high = intervals[worst]
    return Gate("speed.must_beat_float", verdict, ratio, 1.0, (low, high), message)


def describe_undecided(measured: Mapping[str, Any], shared: int, near: str) -> str:
    """Describe what would decide an inconclusive gate, as the end of its message.

    measured: measured numbers, with those of the stopping rule
    shared: number of questions that share latency.max_seconds (count_questions)
    near: the limit, as in "so near 1"
    """
    if "needed" not in measured:
        return "; too few rounds to decide"
    needed = measured["needed"]
    if needed is None:
        return (
            f"; {measured['reckoned']:,} rounds would not decide: it is {near}, or the timings "
            "scatter too much: run it where nothing else runs"
        )
    seconds = round_up(needed["seconds"] * shared)
    if seconds > LONGEST:
        return (
            f"; it is {near} that only {seconds / 3600:,.0f} hours of timing would decide: take it "
            "as equal, or run it where nothing else runs"
        )
    if "openings" in needed:
        return (
            f"; about {needed['openings']} openings of both models would decide: set "
            f"latency.max_seconds: {seconds}"
        )
    return (
        f"; about {needed['rounds']} rounds would decide: set latency.max_seconds: {seconds} "
        f"(or latency.iterations: {needed['rounds']}, which has no time limit)"
    )


def round_up(seconds: float) -> int:
    """Round seconds up to two digits after adding a tenth, because predicted times are not
    exact."""
    spared = max(1.1 * seconds, 1.0)
    unit = int(10 ** max(math.floor(math.log10(spared)) - 1, 0))
    return math.ceil(spared / unit) * unit


def _upper(interval: Sequence[float | None]) -> float:
    high = interval[1]
    return float("inf") if high is None else high


def describe_higher_precision(inspected: Mapping[str, Any]) -> str:
    """Name the modules that the engine runs in higher precision than the recipe asks for."""
    wider = inspected["wider"]
    return (
        f"{len(wider)} of {inspected.get('eligible')} quantized modules run in higher precision "
        f"({', '.join(wider[:3])}{' ...' if len(wider) > 3 else ''})"
    )


def judge_percentile(
    percentiles: Mapping[str, Any], limit: float, what: str, shared: int = 1
) -> Gate:
    """Judge the 99th percentile of a time.

    percentiles: measured percentiles, with the interval of the 99th
    limit: limit in ms
    what: name of the time in the message
    shared: number of questions that share latency.max_seconds (count_questions)
    """
    low, high = percentiles["p99_interval"]
    verdict = "inconclusive"
    if high is not None and high <= limit:
        verdict = "pass"
    elif low is not None and low > limit:
        verdict = "fail"
    message = f"{what} is {percentiles['p99']:.2f} ms"
    if verdict == "fail":
        least, allowed = write_breach(low, limit)
        message += f"; at least {least}, allowed {allowed}"
    if verdict == "inconclusive":
        message += describe_undecided(percentiles, shared, f"so near {limit:g} ms")
    return Gate("speed.p99_ms", verdict, percentiles["p99"], limit, (low, high), message)
