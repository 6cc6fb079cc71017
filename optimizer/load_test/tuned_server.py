"""Measure a bundle's server with each of the settings that tuning tries, in a new process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import MachineError
from optimizer.foundation.progress import say
from optimizer.foundation.verdicts import Verdict
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.load_test import measure
from optimizer.load_test.highest_rate import HighestRate
from optimizer.load_test.http_client import HttpClient
from optimizer.load_test.measure import Objectives, Schedule
from optimizer.load_test.server import run_server
from optimizer.load_test.tuning import OVERLOAD, Tuning, TuningTrial, Values, find_longest_wait

BATCHES = ("rows", "delay_ms", "workers")
FULL = {"rows": "full_batch_ms", "slots": "full_step_ms"}  # fields of the log line warmed_up


@dataclass
class ServerUnderTest:
    """Server of one bundle whose settings are tuned by load tests.

    lines: texts, or paths of images (see inputs.choose_inputs)
    schedule: arrivals of each run
    new_tokens: maximum new tokens of a generation request
    patience: request timeout in seconds
    full: seconds of a full batch, or decode step, of the server that was started last
    most_workers: most workers to try, by the server's log
    """

    bundle: Path
    lines: Sequence[str]
    schedule: Schedule
    objectives: Objectives
    new_tokens: int
    patience: float
    full: float = field(default=0.0, init=False)
    most_workers: int = field(default=1, init=False)

    def start(self) -> Values:
        """Start the server as the bundle is shipped; return the settings (slots, or rows and delay)
        that it reports, with which others are compared. Raises what run_server raises."""
        with run_server(self.bundle) as server:
            line = server.warmed_up
        names = ("slots",) if "slots" in line else BATCHES
        self.most_workers = line.get("most_workers", 1)
        return {name: line[name] for name in names}

    def highest(self, settings: Values) -> HighestRate:
        """Measure by load tests the highest rate that meets the objectives; HighestRate(None, None)
        where this machine cannot run the server with these settings."""
        say(f"tune-serving: {format_settings(settings)}")
        try:
            document = self._measure(settings, None, self.objectives)
        except MachineError as e:
            say(f"tune-serving: {format_settings(settings)}: {e}")
            return HighestRate(None, None)
        return HighestRate(**document["highest_rate"])

    def overload(self, settings: Values, rate: float) -> Verdict:
        """Return the verdict of a load test at a rate above capacity, where all requests may be
        refused."""
        say(f"tune-serving: {format_settings(settings)} at {rate:.4g} requests a second")
        document = self._measure(settings, rate, replace(self.objectives, max_refused=1.0))
        verdict: Verdict = document["verdict"]
        return verdict

    def _measure(
        self, settings: Values, rate: float | None, objectives: Objectives
    ) -> dict[str, Any]:
        with run_server(self.bundle, list_arguments(settings)) as server:
            key = next(FULL[name] for name in FULL if name in settings)
            self.full = server.warmed_up[key] / 1000
            client = HttpClient(server.url, "", self.new_tokens, self.patience)
            return measure.measure(client, self.lines, self.schedule, rate, objectives)


def list_arguments(settings: Values) -> list[str]:
    """Return options of `optimize serve` for these settings of a server under test; settings of
    None have no option."""
    return [
        word
        for name, value in settings.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", f"{value:.9g}")
    ]


def tune(server: ServerUnderTest) -> dict[str, Any]:
    """Search for the best settings of a server by load tests. Returns {"serve": best settings,
    "verdict", "highest_rate", "trials": [{settings, met, missed}], "overload": {rate, kept},
    "objectives", "machine"}; verdict "fail": no settings met the objectives at any rate;
    "inconclusive": none did, and runs of some were too short to decide. Raises what `run_server`
    and measure.measure raise."""
    start = server.start()
    tuning = Tuning(server.highest, server.most_workers)
    best = tuning.best(start)
    document: dict[str, Any] = {
        "serve": dict(best.settings),
        "verdict": _verdict(best, tuning.trials),
        "highest_rate": {"met": best.highest.met, "missed": best.highest.missed},
        "trials": [
            {"settings": dict(t.settings), "met": t.highest.met, "missed": t.highest.missed}
            for t in tuning.trials
        ],
        "objectives": dict(server.objectives.limits),
        "machine": describe_machine().to_json(),
    }
    limits = server.objectives.limits
    limit = limits.get("first_token", limits.get("latency"))
    if best.highest.met is not None and limit is not None:
        rate = OVERLOAD * best.highest.met
        wait, kept = _longest_wait(server, best.settings, rate, limit / 1000)
        document["serve"] |= {} if wait is None else {"max_wait": wait}
        document["overload"] = {"rate": rate, "kept": kept}
    return document


def _verdict(best: TuningTrial, trials: Sequence[TuningTrial]) -> Verdict:
    undecided = any(t.highest.undecided for t in trials)
    return replace(best.highest, undecided=undecided).verdict


def _longest_wait(
    server: ServerUnderTest, settings: Values, rate: float, limit: float
) -> tuple[float | None, bool]:
    """Return (result of `longest_wait`, True), or (None, False) if it fails. limit: seconds."""
    try:
        longest = find_longest_wait(
            lambda wait: server.overload({**settings, "max_wait": wait}, rate), limit, server.full
        )
    except LookupError:
        return None, False
    return longest, True


def format_document(document: Mapping[str, Any]) -> str:
    """Write for `optimize tune-serving` every trial, then the best settings as a section of a
    recipe."""
    lines = [f"  {format_settings(t['settings'])}: {_rate(t)}" for t in document["trials"]]
    if document["verdict"] == "inconclusive":
        fix = "increase --seconds"
        return "\n".join([*lines, f"runs were too short to decide if objectives are met; {fix}"])
    if document["verdict"] == "fail":
        fix = "loosen them, or increase --seconds, so that lower rates can be decided"
        return "\n".join([*lines, f"no settings met the objectives at any rate tried; {fix}"])
    overload = document.get("overload")
    if overload is not None:
        result = "meet the objectives" if overload["kept"] else "miss them with any max_wait"
        lines.append(f"  at {overload['rate']:.4g} requests a second the answered ones {result}")
    lines += ["serve:", *(f"  {name}: {value:g}" for name, value in document["serve"].items())]
    return "\n".join(lines)


def _rate(trial: Mapping[str, Any]) -> str:
    if trial["met"] is None:
        return "no rate met the objectives"
    missed = f", {trial['missed']:.4g} did not" if trial["missed"] is not None else ""
    return f"{trial['met']:.4g} requests a second met them{missed}"


def format_settings(settings: Values) -> str:
    """Return a server's settings for people, such as "rows 8, workers 2"."""
    return ", ".join(f"{name} {value}" for name, value in settings.items())
