"""A bundle's server with settings that a search tries: started, asked, ended, for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import MachineError
from optimizer.foundation.progress import say
from optimizer.foundation.verdicts import Verdict
from optimizer.harness.runtimes.machine import this_machine
from optimizer.load_test import measure
from optimizer.load_test.highest_rate import HighestRate
from optimizer.load_test.http_client import HttpClient
from optimizer.load_test.measure import Arrivals, Objectives
from optimizer.load_test.server import served
from optimizer.load_test.tuning import OVERLOAD, Tuning, Values, longest_wait

BATCHES = ("rows", "delay_ms", "workers")
FULL = {"rows": "full_batch_ms", "slots": "full_step_ms"}  # of the line warmed_up


@dataclass
class TunedServer:
    """lines: see inputs.of. come: of each run. tokens: to continue a text by; patience: seconds
    until an answer is lost."""

    bundle: Path
    lines: Sequence[str]
    come: Arrivals
    objectives: Objectives
    tokens: int
    patience: float
    full: float = field(default=0.0, init=False)  # seconds of a full batch, or step, of late
    most_workers: int = field(default=1, init=False)  # that there is a use for

    def start(self) -> Values:
        """The settings of the bundle. Raises what `served` does."""
        with served(self.bundle) as server:
            line = server.warmed_up
        names = ("slots",) if "slots" in line else BATCHES
        self.most_workers = line.get("most_workers", 1)
        return {name: line[name] for name in names}

    def highest(self, settings: Values) -> HighestRate:
        """The highest rate that meets the objectives; none where this machine cannot hold such a
        server."""
        say(f"tune-serving: {_worded(settings)}")
        try:
            document = self._measured(settings, None, self.objectives)
        except MachineError as e:
            say(f"tune-serving: {_worded(settings)}: {e}")
            return HighestRate(None, None)
        return HighestRate(**document["highest_rate"])

    def overloaded(self, settings: Values, rate: float) -> Verdict:
        """Whether what is answered keeps the objectives where too many come; any may be refused."""
        say(f"tune-serving: {_worded(settings)} at {rate:.4g} requests a second")
        document = self._measured(settings, rate, replace(self.objectives, refusals=1.0))
        verdict: Verdict = document["verdict"]
        return verdict

    def _measured(
        self, settings: Values, rate: float | None, objectives: Objectives
    ) -> dict[str, Any]:
        with served(self.bundle, arguments(settings)) as server:
            own = next(FULL[name] for name in FULL if name in settings)
            self.full = server.warmed_up[own] / 1000
            client = HttpClient(server.url, "", self.tokens, self.patience)
            return measure.measure(client, self.lines, self.come, rate, objectives)


def arguments(settings: Values) -> list[str]:
    """As options of `optimize serve`."""
    return [
        word
        for name, value in settings.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", f"{value:.9g}")
    ]


def tune(server: TunedServer) -> dict[str, Any]:
    """The document of a search: {"serve": the settings found, "verdict", "highest_rate",
    "trials": [{settings, met, missed}], "overload": {rate, kept}, "objectives", "machine"}; verdict
    "fail" where no settings met the objectives at any rate. Raises what `served` and
    measure.measure do."""
    start = server.start()
    tuning = Tuning(server.highest, server.most_workers)
    best = tuning.best(start)
    document: dict[str, Any] = {
        "serve": dict(best.settings),
        "verdict": "fail" if best.highest.met is None else "pass",
        "highest_rate": {"met": best.highest.met, "missed": best.highest.missed},
        "trials": [
            {"settings": dict(t.settings), "met": t.highest.met, "missed": t.highest.missed}
            for t in tuning.trials
        ],
        "objectives": dict(server.objectives.limits),
        "machine": this_machine().to_json(),
    }
    limits = server.objectives.limits
    limit = limits.get("first_token", limits.get("latency"))
    if best.highest.met is not None and limit is not None:
        rate = OVERLOAD * best.highest.met
        wait, kept = _wait(server, best.settings, rate, limit / 1000)
        document["serve"] |= {} if wait is None else {"max_wait": wait}
        document["overload"] = {"rate": rate, "kept": kept}
    return document


def _wait(
    server: TunedServer, settings: Values, rate: float, limit: float
) -> tuple[float | None, bool]:
    """The longest wait, and whether it keeps the objectives. limit: seconds."""
    try:
        longest = longest_wait(
            lambda wait: server.overloaded({**settings, "max_wait": wait}, rate), limit, server.full
        )
    except LookupError:
        return None, False
    return longest, True


def text_of(document: Mapping[str, Any]) -> str:
    """For a person: every trial, and the settings as a recipe has them."""
    lines = [f"  {_worded(t['settings'])}: {_rate(t)}" for t in document["trials"]]
    if document["verdict"] == "fail":
        fix = "loosen them, or give --seconds more, so that lower rates are decided"
        return "\n".join([*lines, f"no settings met the objectives at any rate tried; {fix}"])
    overload = document.get("overload")
    if overload is not None:
        what = "kept" if overload["kept"] else "not kept, whatever requests may wait,"
        lines.append(f"  objectives of what is answered {what} at {overload['rate']:.4g} a second")
    lines += ["serve:", *(f"  {name}: {value:g}" for name, value in document["serve"].items())]
    return "\n".join(lines)


def _rate(trial: Mapping[str, Any]) -> str:
    if trial["met"] is None:
        return "no rate met the objectives"
    missed = f", {trial['missed']:.4g} did not" if trial["missed"] is not None else ""
    return f"{trial['met']:.4g} requests a second met them{missed}"


def _worded(settings: Values) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
