"""Time several systems in turns, end to end and by stage.

A system is three functions of one batch: pre (texts to arrays), forward, post (to answers). In
every round each system answers the same texts once, in an order that changes, so that a slow
moment of the machine hits all alike; ratios of two systems are taken round by round. Warm-up
rounds are discarded.

A session is faster or slower for as long as it is open, by the place of its weights and buffers in
memory (two of MiniLM in INT8 differed by 4 %). So systems may be opened again after some rounds
(`Again`), and are then compared opening by opening.

Intervals of percentiles are distribution-free: the q-quantile lies between two order statistics
with a probability that depends on their ranks only. They assume independent rounds. With few
rounds no rank bounds a high percentile from above (p99 at 95 % needs 368 rounds); the upper end is
then None: unknown, not infinite. Called by `bench` and optimizer/timing.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..bounds import CONFIDENCE, fewest
from ..errors import HarnessError, InputError
from ..inputs.text import lengthen
from ..process.child import run_python
from ..process.collection import pause_collection
from ..runtimes.machine import describe_machine

STAGES = ("pre", "forward", "post")
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class System:
    """Bundle's engine, or another system, to time, as functions of one batch.

    pre: (inputs, size) -> arrays; encodes inputs at exactly `size` tokens
    forward: arrays -> outputs
    post: (outputs, arrays) -> answers
    lengthen: (inputs, size) -> one input of at least `size`
    """

    pre: Callable[[Sequence[Any], int], Any]
    forward: Callable[[Any], Any]
    post: Callable[[Any, Any], Any]
    lengthen: Callable[[Iterable[Any], int], Any] = lengthen


@dataclass(frozen=True)
class Again:
    """Plan for closing and opening all systems while `bench` times them.

    rounds: rounds that count after each opening
    open: function that opens the systems anew
    """

    rounds: int
    open: Callable[[], None]


def measure(
    systems: Mapping[str, System],
    cells: Sequence[tuple[int, int]],
    texts: Sequence[Any],
    *,
    iterations: int = 40,
    warmup: int = 5,
    threads: int = 0,
    baseline: str = "onnxruntime-float",
    candidate: str = "candidate",
    more: Callable[[Mapping[str, Sequence[float]]], int] | None = None,
    beside: Collection[str] = (),
    again: Again | None = None,
) -> dict[str, Any]:
    """Time a bundle and other systems in turns; return {"machine", "threads", "cells": [...]},
    times in ms.

    A cell has a ratio (candidate over baseline, below 1 is faster) if both systems are given.

    systems: {name: system}
    cells: (batch, sequence) pairs
    texts: real inputs; texts are joined until a row has `sequence` words, so no row is padding
    iterations, warmup: rounds that count, and rounds before them
    threads: number to report; systems have their own
    baseline, candidate: names of the two systems of the ratio
    more: function of {system: end-to-end ms so far} that returns further rounds; 0 ends
    beside: systems that are only shown; they skip rounds once they have taken as much time as all
        others together and their medians are bounded
    again: plan for opening the systems again; None: they stay open

    Raises InputError without texts, systems or cells.
    """
    for name, value in (("systems", systems), ("cells", cells), ("texts", texts)):
        if not value:
            raise InputError("none were given", where=name)
    measured, longer = [], next(iter(systems.values())).lengthen
    for batch, sequence in cells:
        rounds = _make_batches(texts, batch, sequence, longer)
        counted = RoundPlan(iterations, warmup, more, beside, again)
        times = _run_rounds(systems, rounds, sequence, counted)
        cell: dict[str, Any] = {
            "batch": batch,
            "sequence": sequence,
            "runs": max(len(t["forward"]) for t in times.values()),
            "systems": {name: _summary(batch, t) for name, t in times.items()},
        }
        if baseline in times and candidate in times:
            cell["ratio"] = {
                "of": candidate,
                "to": baseline,
                **_ratio(times[candidate], times[baseline]),
            }
        measured.append(cell)
    return {"machine": describe_machine().to_json(), "threads": threads, "cells": measured}


def percentile(samples: Sequence[float], percent: float) -> float:
    """Compute a percentile of timed samples of a bundle, linear between order statistics (type 7 of
    R)."""
    return float(np.percentile(samples, percent))


def percentile_interval(
    samples: Sequence[float], percent: float, confidence: float = CONFIDENCE
) -> tuple[float | None, float | None]:
    """Compute the confidence interval of a percentile of a bundle's times from order statistics,
    tails split evenly.

    An end is None if there are too few samples to bound it (David & Nagaraja, Order Statistics,
    7.1).
    """
    ordered, q, tail = sorted(samples), percent / 100, (1 - confidence) / 2
    n = len(ordered)
    below = list(itertools.accumulate(_binomial(n, q)))  # below[k] = P(at most k samples below q)
    low = max((k for k in range(1, n + 1) if below[k - 1] <= tail), default=0)
    high = min((k for k in range(1, n + 1) if below[k - 1] >= 1 - tail), default=0)
    return (ordered[low - 1] if low else None, ordered[high - 1] if high else None)


def read_peak_memory() -> int:
    """Return the peak resident bytes so far of this process, which runs a bundle."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def read_peak(code: str) -> int:
    """Measure the peak resident bytes of a fresh Python that runs `code`, such as a bundle's model.

    The child measures itself, because the usage that a parent reads starts at the parent's size.
    Raises HarnessError with the child's last line if it fails.
    """
    script = f"{code}\nfrom {__name__} import read_peak_memory\nprint(read_peak_memory())"
    done = run_python(script, Path(__file__).parents[2])
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if done.returncode == -signal.SIGKILL:
            last = "it was killed, as where memory is short"
        raise HarnessError(f"the measured process failed: {last}", where="peak memory")
    return int(json.loads(done.stdout.strip().splitlines()[-1]))


def _make_batches(
    inputs: Sequence[Any],
    batch: int,
    size: int,
    longer: Callable[[Iterable[Any], int], Any],
) -> list[list[Any]]:
    """Make the batches with which a bundle is timed, of `batch` rows of `size`, each row starting
    at another input.

    longer: function that joins inputs to one of at least `size`
    """

    def row(at: int) -> Any:
        return longer(itertools.islice(itertools.cycle(inputs), at, None), size)

    return [[row(at) for at in range(i, i + batch)] for i in range(0, len(inputs), batch)]


@dataclass(frozen=True)
class RoundPlan:
    """Plan of the timing of one cell (batch size and length): its rounds. The fields are the
    parameters of `measure`."""

    iterations: int
    warmup: int
    more: Callable[[Mapping[str, Sequence[float]]], int] | None
    beside: Collection[str]
    again: Again | None = None

    def sits_out(self, name: str, times: Mapping[str, dict[str, list[float]]]) -> bool:
        """Return True if a timed system of `beside` skips the round, having had its share of the
        time.

        times: {system: {stage: ms of each round}}
        """
        own = _end_to_end(times[name]) if name in self.beside else []
        if len(own) < fewest(50):
            return False
        return sum(own) > sum(sum(_end_to_end(t)) for n, t in times.items() if n != name)


def _run_rounds(
    systems: Mapping[str, System], rounds: list[list[Any]], sequence: int, counted: RoundPlan
) -> dict[str, dict[str, list[float]]]:
    """Time a bundle and other systems in turns, round by round; returns {system: {stage:
    milliseconds of each counted round}}."""
    times: dict[str, dict[str, list[float]]] = {n: {s: [] for s in STAGES} for n in systems}
    names = list(systems)
    with pause_collection():  # a collection would be charged to another system than caused it
        more = counted.more
        further = (lambda: more({n: _end_to_end(t) for n, t in times.items()})) if more else None
        plan = plan_rounds(counted.iterations, counted.warmup, counted.again, further)
        done = 0
        for i, counts in enumerate(plan):
            for name in order_systems(names, done):
                if counted.sits_out(name, times):
                    continue
                taken = _time_batch(systems[name], rounds[i % len(rounds)], sequence)
                for stage, seconds in zip(STAGES, taken, strict=True):
                    times[name][stage] += [seconds * 1e3] if counts else []
            done += counts
    return times


def order_systems(names: Sequence[str], round_: int) -> list[str]:
    """Return the order in which the timed systems run in a round.

    It rotates every two rounds, and is reversed in the second of these, so that each of two systems
    runs first in one of them.
    """
    first = round_ // 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if round_ % 2 else order


def plan_rounds(
    iterations: int, warmup: int, again: Again | None, more: Callable[[], int] | None
) -> Iterator[bool]:
    """Yield True for each round that counts of a timing of bundles, False for warm-up rounds, which
    follow each opening.

    more: function that returns further rounds; 0 ends
    """
    done, left = 0, iterations
    while left > 0:
        for at in range(done, done + left):
            opened = again is not None and at > 0 and at % again.rounds == 0
            if again is not None and opened:
                again.open()
            yield from [False] * (warmup if opened or at == 0 else 0)
            yield True
        done += left
        left = more() if more else 0


def _time_batch(system: System, texts: list[Any], sequence: int) -> tuple[float, float, float]:
    """Time one batch in a system, such as a bundle; returns the seconds of each of STAGES."""
    clock = time.perf_counter
    t0 = clock()
    arrays = system.pre(texts, sequence)
    t1 = clock()
    outputs = system.forward(arrays)
    t2 = clock()
    system.post(outputs, arrays)
    t3 = clock()
    return t1 - t0, t2 - t1, t3 - t2


def _summary(batch: int, stages: dict[str, list[float]]) -> dict[str, Any]:
    total = _end_to_end(stages)
    return {
        "end_to_end": {**percentiles(total), "samples": [round(t, 4) for t in total]},
        "stages": {name: percentiles(values) for name, values in stages.items()},
        "throughput": batch * len(total) / sum(total) * 1e3,
    }


def _end_to_end(stages: dict[str, list[float]]) -> list[float]:
    return [sum(parts) for parts in zip(*stages.values(), strict=True)]


def percentiles(samples: Sequence[float]) -> dict[str, Any]:
    """Compute PERCENTILES of the times of a bundle's batches: {"p50": ..., "p50_interval": [low,
    high], ...}."""
    values: dict[str, Any] = {f"p{p}": percentile(samples, p) for p in PERCENTILES}
    for p in PERCENTILES:
        values[f"p{p}_interval"] = list(percentile_interval(samples, p))
    return values


def _ratio(candidate: dict[str, list[float]], baseline: dict[str, list[float]]) -> dict[str, Any]:
    """Compare by round the end-to-end times of a bundle and its baseline.

    candidate, baseline: {stage: ms of each round}
    """
    return compare_times(_end_to_end(candidate), _end_to_end(baseline))


def compare_times(candidate: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Return {"median", "interval": [low, high]} of a timed bundle's time / its baseline's in each
    round."""
    ratios = [c / b for c, b in zip(candidate, baseline, strict=True)]
    return {"median": percentile(ratios, 50), "interval": list(percentile_interval(ratios, 50))}


def _binomial(n: int, q: float) -> list[float]:
    """Return, for the interval of a percentile, P(k of n), k = 0..n, computed in logarithms so that
    a large n does not underflow."""
    log_q, log_r = math.log(q), math.log1p(-q)
    return [
        math.exp(
            math.lgamma(n + 1)
            - math.lgamma(k + 1)
            - math.lgamma(n - k + 1)
            + k * log_q
            + (n - k) * log_r
        )
        for k in range(n + 1)
    ]
