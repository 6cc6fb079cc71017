"""Timing of worker processes in turns: rounds in an order that rotates, ratios within a round."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.measure.processes import OURS, REFERENCE, Worker
from optimizer.foundation.progress import say
from optimizer.harness.bundle.bench import percentile, percentile_interval

BATCHES = (1, 8)
ITERATIONS = {1: 16, 8: 4}  # per system and round
WARMUP = {1: 3, 8: 1}  # calls after a worker resumes: its memory has left the caches


def attempt(rows: dict[str, Any], name: str, work: Callable[[], Any]) -> Any:
    """Call `work`; the failure of a peer becomes the reason in its row."""
    say(f"  {name}")
    try:
        return work()
    except RuntimeError as e:
        if name in (OURS, REFERENCE):
            raise
        rows[name]["why"] = f"failed: {' '.join(str(e).split())[-200:]}"
        say(rows[name]["why"])
        return None


def warm(worker: Worker) -> None:
    """Ask for each batch size once, since a new shape may be compiled."""
    for batch in BATCHES:
        worker.ask(run=1, warmup=2, batch=batch)


def time_in_turns(
    workers: Mapping[str, Worker], rows: dict[str, Any], batch: int, asked: argparse.Namespace
) -> dict[str, list[list[float]]]:
    """Time all systems as {system: [milliseconds of each call, per round]}."""
    times: dict[str, list[list[float]]] = {n: [] for n in workers if not rows[n]["why"]}
    names = list(times)
    request = {"run": ITERATIONS[batch], "warmup": WARMUP[batch], "clock": asked.clock}
    for r in range(asked.rounds):
        say(f"batch {batch}: round {r + 1} of {asked.rounds}")
        start = r % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(workers[name].ask(**request, batch=batch)["ms"])
    return times


def summarize(
    times: Mapping[str, list[list[float]]], reference: str = REFERENCE
) -> dict[str, dict[str, Any]]:
    """Compute milliseconds, and ratios to the reference of the same round, of each system."""
    medians = {n: [percentile(r, 50) for r in rounds] for n, rounds in times.items()}
    made = {}
    for name, mine in medians.items():
        ratios = [a / b for a, b in zip(mine, medians[reference], strict=True)]
        every = [t for r in times[name] for t in r]
        made[name] = {
            "ms": {"p50": percentile(every, 50), "p99": percentile(every, 99), "min": min(every)},
            "ratio": {
                "median": percentile(ratios, 50),
                "interval": list(percentile_interval(ratios, 50)),
                "rounds": ratios,
            },
        }
    return made
