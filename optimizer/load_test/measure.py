"""Run one load test: at a rate, or searching for the highest rate that meets the objectives; or
time a server at several numbers of requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np

from optimizer.foundation.errors import MachineError
from optimizer.foundation.progress import say
from optimizer.foundation.verdicts import Verdict
from optimizer.harness.bounds import fewest
from optimizer.harness.inputs.text import TEXT
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.load_test import arrivals, figures, highest_rate, inputs, open_loop
from optimizer.load_test.open_loop import Client, Reply
from optimizer.load_test.requests import RequestKind
from optimizer.recipe.serving import solve_mean_requests


@dataclass(frozen=True)
class Schedule:
    """Instants at which a load test's requests are due: Poisson arrivals, bursts, or a recording.

    seconds: length of one run
    burst: number of requests at the same instant; 1: no bursts
    recording: recorded instants in seconds; (): no recording
    """

    seconds: float
    seed: int = 0
    burst: int = 1
    recording: Sequence[float] = ()

    def instants(self, rate: float) -> list[float]:
        """Draw the instants of one run's requests in a load test (arrivals.py). rate: requests per
        second."""
        if self.recording:
            return arrivals.recorded(self.recording, rate, self.seconds)
        if self.burst > 1:
            return arrivals.bursts(rate, self.seconds, self.seed, self.burst)
        return arrivals.poisson(rate, self.seconds, self.seed)

    def __str__(self) -> str:
        if self.recording:
            return "recorded"
        return f"bursts of {self.burst}" if self.burst > 1 else "poisson"


@dataclass(frozen=True)
class Objectives:
    """Objectives that a server must meet in a run of a load test.

    limits: {kind of time (figures.TIMES): limit of its 99th percentile in ms}
    max_refused: share of requests that may be refused, 0 to 1
    """

    limits: Mapping[str, float] = field(default_factory=dict)
    max_refused: float = 0.0


def measure(
    client: Client,
    lines: Sequence[str],
    schedule: Schedule,
    rate: float | None,
    objectives: Objectives,
) -> dict[str, Any]:
    """Run a load test of a server and return its document. Raises what Client and choose_inputs
    raise.

    client: client that is not yet entered
    lines: texts, or paths of images (see inputs.choose_inputs)
    rate: requests per second; None: search for the highest that meets the objectives, from the
        lowest at which a run of this length can decide
    """
    return asyncio.run(_measure(client, lines, schedule, rate, objectives))


def measure_together(
    client: Client, lines: Sequence[str], sizes: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Time a generating server with `size` requests at once, `rounds` times for each of `sizes`.
    Returns an entry per size, with times in ms: percentiles of the time to the first token and of
    the time between tokens, and tokens per second of all requests together.

    lines: texts, sent in turn, so that a server finds none in its prefix cache while they suffice;
        (): neutral ones

    Raises MachineError for a request without a complete answer, and what Client raises.
    """
    return asyncio.run(_run_together(client, lines, sizes, rounds))


async def _run_together(
    client: Client, lines: Sequence[str], sizes: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Send a server `size` requests at once, `rounds` times for each of `sizes`; return an entry
    per size."""
    entries = []
    async with client:
        model = await client.model()
        values = (await inputs.choose_inputs(client, model, lines)).values
        kind = await client.kind(model, TEXT.columns[0], values[0])
        texts = islice(cycle(values), 1, None)
        for size in sizes:
            replies, seconds = list[Reply](), 0.0
            for _ in range(rounds):
                some = await open_loop.send_all(
                    client, kind, model, [*islice(texts, size)], [0.0] * size
                )
                seconds += max(reply.ended for reply in some)
                replies += some
            for reply in replies:
                if reply.status != 200 or reply.lost:
                    raise MachineError(
                        f"a request of {size} at once has status {reply.status} {reply.lost}",
                        where=client.url,
                    )
            between = [b - a for r in replies for a, b in pairwise(r.pieces)]
            entries.append(
                {
                    "requests_at_once": size,
                    "rounds": rounds,
                    "first_token_ms": _percentiles([r.pieces[0] - r.sent for r in replies]),
                    "between_tokens_ms": _percentiles(between),
                    "tokens_per_second": sum(len(r.pieces) for r in replies) / seconds,
                }
            )
    return entries


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return {"p50", "p90", "p99"} of a load test's times in seconds, in ms; None without
    values."""
    if not seconds:
        return None
    return {f"p{p}": float(np.percentile(seconds, p)) * 1000 for p in (50, 90, 99)}


async def _measure(
    client: Client,
    lines: Sequence[str],
    schedule: Schedule,
    rate: float | None,
    objectives: Objectives,
) -> dict[str, Any]:
    """Run a load test at `rate`, or search for the highest rate if it is None; return the
    document."""
    async with client:
        model = await client.model()
        chosen = await inputs.choose_inputs(client, model, lines)
        kind = await client.kind(model, chosen.column, chosen.values[0])
        expected = await open_loop.ask_alone(client, kind, model, chosen.values)
        test = _LoadTest(client, kind, model, expected, schedule, objectives)
        document: dict[str, Any] = {"url": client.url, "model": model, "requests": kind.name}
        document["inputs"] = chosen.column
        if rate is not None:
            verdict = await test.run_at(rate)
        else:
            start = 1 / max(await test.seconds_alone(), 1e-4)
            loop = asyncio.get_running_loop()

            def run_at(tried: float) -> Verdict:
                return asyncio.run_coroutine_threadsafe(test.run_at(tried), loop).result()

            least = _lowest_rate(schedule, objectives)
            highest = await asyncio.to_thread(highest_rate.search, run_at, start, least)
            document |= {"highest_rate": asdict(highest), "least_rate": least}
            verdict = highest.verdict
    return {
        **document,
        "machine_of_the_client": describe_machine().to_json(),
        "runs": test.runs,
        "objectives": dict(objectives.limits),
        "verdict": verdict,
    }


def _lowest_rate(schedule: Schedule, objectives: Objectives) -> float:
    """Return the lowest request rate at which a run has enough requests to bound a 99th percentile;
    LOWEST if only times between tokens are limited, because each request has many."""
    if objectives.limits.keys() <= {"between"}:
        return highest_rate.LOWEST
    requests = solve_mean_requests(fewest(99), schedule.burst)
    return max(highest_rate.LOWEST, requests / schedule.seconds)


@dataclass
class _LoadTest:
    """Load test of one model with one kind of request.

    expected: {input: its answer when sent alone}
    runs: documents of all runs so far
    """

    client: Client
    kind: RequestKind
    model: str
    expected: Mapping[str, str]
    schedule: Schedule
    objectives: Objectives
    runs: list[dict[str, Any]] = field(default_factory=list)

    async def run_at(self, rate: float) -> Verdict:
        """Send requests at this rate, append the run's document to `runs` and return its
        verdict."""
        values, seconds = [*self.expected], self.schedule.seconds
        say(f"load: {rate:.4g} requests a second for {seconds:g} s")
        due = self.schedule.instants(rate)
        replies = await open_loop.send_all(self.client, self.kind, self.model, values, due)
        answers = [self.expected[values[i % len(values)]] for i in range(len(due))]
        run = figures.summarize_run(replies, answers, seconds, self.objectives.limits)
        verdict = figures.judge_figures(run, self.objectives.limits, self.objectives.max_refused)
        arrived = str(self.schedule)
        about = {"rate": rate, "seconds": seconds, "arrivals": arrived, "verdict": verdict}
        self.runs.append({**about, **run})
        say(
            f"load: {run['answered']} of {run['sent']} answered, {run['refused']} refused, "
            f"{run['wrong']} wrong, {run['lost']} lost: {verdict}"
        )
        return verdict

    async def seconds_alone(self) -> float:
        """Return the median seconds of a request that the server under test gets alone, over three
        requests per input."""
        taken = []
        for value in [*self.expected] * 3:
            reply = Reply(0.0)
            await self.client.ask(self.kind, self.model, value, reply, 0.0)
            taken.append(reply.ended - reply.sent)
        return sorted(taken)[len(taken) // 2]
