"""One load test: a run at a rate, or a search for the highest rate that meets the objectives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from optimizer.foundation.progress import say
from optimizer.foundation.verdicts import Verdict
from optimizer.harness.bounds import fewest
from optimizer.harness.runtimes.machine import this_machine
from optimizer.load_test import arrivals, figures, highest_rate, inputs, open_loop
from optimizer.load_test.open_loop import Client, Outcome
from optimizer.load_test.requests import Kind


@dataclass(frozen=True)
class Arrivals:
    """How requests come. burst: at the same instant, 1 for none. recording: instants, () for
    none."""

    seconds: float
    seed: int = 0
    burst: int = 1
    recording: Sequence[float] = ()

    def instants(self, rate: float) -> list[float]:
        """See arrivals.py."""
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
    """limits: {kind of time: ms that its 99th percentile may take}. refusals: the share of
    requests that may be refused."""

    limits: Mapping[str, float] = field(default_factory=dict)
    refusals: float = 0.0


def measure(
    client: Client,
    lines: Sequence[str],
    come: Arrivals,
    rate: float | None,
    objectives: Objectives,
) -> dict[str, Any]:
    """The document of a test. client: not yet entered. lines: texts, or paths of images; see
    inputs.of. rate: requests a second; None: the highest that meets the objectives is searched,
    from the lowest at which a run of such a length decides.
    Raises as Client and inputs.of do."""
    return asyncio.run(_measured(client, lines, come, rate, objectives))


async def _measured(
    client: Client,
    lines: Sequence[str],
    come: Arrivals,
    rate: float | None,
    objectives: Objectives,
) -> dict[str, Any]:
    async with client:
        model = await client.model()
        chosen = await inputs.of(client, model, lines)
        kind = await client.kind(model, chosen.column, chosen.values[0])
        expected = await open_loop.alone(client, kind, model, chosen.values)
        job = _Job(client, kind, model, expected, come, objectives)
        document: dict[str, Any] = {"url": client.url, "model": model, "requests": kind.name}
        document["inputs"] = chosen.column
        if rate is not None:
            verdict = await job.at(rate)
        else:
            start = 1 / max(await job.seconds_alone(), 1e-4)
            loop = asyncio.get_running_loop()

            def at(tried: float) -> Verdict:
                return asyncio.run_coroutine_threadsafe(job.at(tried), loop).result()

            least = _least(come, objectives)
            highest = await asyncio.to_thread(highest_rate.search, at, start, least)
            document |= {"highest_rate": asdict(highest), "least_rate": least}
            verdict = "fail" if highest.met is None else "pass"
    return {
        **document,
        "machine_of_the_client": this_machine().to_json(),
        "runs": job.runs,
        "objectives": dict(objectives.limits),
        "verdict": verdict,
    }


def _least(come: Arrivals, objectives: Objectives) -> float:
    """The lowest rate at which a run has so many requests that a 99th percentile is bounded; times
    between tokens are more than requests."""
    if objectives.limits.keys() <= {"between"}:
        return highest_rate.LOWEST
    return max(highest_rate.LOWEST, arrivals.mean_for(fewest(99), come.burst) / come.seconds)


@dataclass
class _Job:
    client: Client
    kind: Kind
    model: str
    expected: Mapping[str, str]
    come: Arrivals
    objectives: Objectives
    runs: list[dict[str, Any]] = field(default_factory=list)

    async def at(self, rate: float) -> Verdict:
        """A run at this rate, kept in `runs`."""
        values, come = [*self.expected], self.come
        say(f"load: {rate:.4g} requests a second for {come.seconds:g} s")
        due = come.instants(rate)
        outcomes = await open_loop.run(self.client, self.kind, self.model, values, due)
        answers = [self.expected[values[i % len(values)]] for i in range(len(due))]
        run = figures.of_run(outcomes, answers, come.seconds, self.objectives.limits)
        verdict = figures.verdict(run, self.objectives.limits, self.objectives.refusals)
        about = {"rate": rate, "seconds": come.seconds, "arrivals": str(come), "verdict": verdict}
        self.runs.append({**about, **run})
        say(
            f"load: {run['answered']} of {run['sent']} answered, {run['refused']} refused, "
            f"{run['wrong']} wrong, {run['lost']} lost: {verdict}"
        )
        return verdict

    async def seconds_alone(self) -> float:
        """What a request takes when there is no other: the median of a few of each input."""
        taken = []
        for value in [*self.expected] * 3:
            outcome = Outcome(0.0)
            await self.client.ask(self.kind, self.model, value, outcome, 0.0)
            taken.append(outcome.ended - outcome.sent)
        return sorted(taken)[len(taken) // 2]
