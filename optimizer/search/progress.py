"""Record the progress of a search beside its steps.

A resumed search adds to the time that it has used, and does not repeat a candidate that twice ended
the process.

<store>/search/<recipe's name>.json, or the same name in a bucket:
    of         digest of the recipe and of its model's answers; a file of another search is ignored
    finished   number of trials that have ended
    seconds    time of the search at the end of the last of them
    longest    seconds of the longest of them, in the run that ended it
    seconds_of_gates
               {target: [all but their timing, their timing]}, the longest of each
    running    {"form", "steps", "ends"} of the trial that runs: finished steps of the store before
               it, and how often the process has ended in it without finishing a further one
    skipped    candidates that are not tried again
    unmeasured reason for which the modules are not measured, "" where they are; null before this
               was decided

An end of the process may have other causes, such as a power cut; two without a finished step
between them are attributed to the candidate.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from optimizer.foundation import atomic
from optimizer.foundation.progress import say
from optimizer.search.candidates import Candidate
from optimizer.search.trial import Trial
from optimizer.shared_store import Root, SharedStore
from optimizer.store import MADE_FROM

ENDS = 2
WHY = "the process ended twice in it, as for want of memory; to try it again delete {file}"


class Progress:
    """Progress of one search.

    of: digest of the recipe and of its model's answers
    started: clock in seconds at the start of this run

    timings: {target: seconds after which the timing of a candidate's gates ends}
    again: seconds after which the second timing of a candidate beside the recipe ends
    validated: candidate that went through all gates before the others were tried; None: none did
    ended: reason for which no further trial started; "" without one
    over: the confirmation that ended after the budget, and its times; "" without one
    """

    def __init__(
        self, root: Root, name: str, of: str, clock: Callable[[], float], started: float
    ) -> None:
        self._root, self._name = root, f"search/{name}.json"
        self._clock, self._since = clock, started
        fresh: dict[str, Any] = {"finished": 0, "seconds": 0.0, "longest": 0.0}
        fresh |= {"seconds_of_gates": {}, "running": None, "skipped": [], "unmeasured": None}
        self._state = {"of": of, **fresh}
        self._began = started
        self.timings: Mapping[int, float] = {}
        self.again = 0.0
        self.validated: Candidate | None = None
        self.ended = self.over = ""
        with suppress(OSError, ValueError, LookupError, TypeError):
            if isinstance(root, SharedStore):
                data = root.read(self._name) or b""
            else:
                data = (root / self._name).read_bytes()
            read = json.loads(data)
            if read["of"] == of and set(read) == set(self._state):
                self._state = read

    @property
    def finished(self) -> int:
        """Number of trials that earlier runs of this search have ended."""
        return int(self._state["finished"])

    @property
    def seconds(self) -> float:
        """Seconds spent on the search, earlier runs included."""
        return float(self._state["seconds"]) + self._clock() - self._since

    def predict_confirmation(self, target: int, trials: Sequence[Trial]) -> float:
        """Predict the most seconds that a confirmation takes on a target.

        They are those of the gates of an earlier candidate there, with their timing up to its
        limit, and those of timing again. Before one, the gates of another target count, with their
        time multiplied by the largest ratio of measured times of answers, where this is above 1.

        trials: trials of the search so far
        """
        gates = {int(known): seconds for known, seconds in self._state["seconds_of_gates"].items()}
        known = {target: gates[target]} if target in gates else gates
        slowest = _slowest(trials)
        limit, longest = self.timings.get(target, 0.0), 0.0
        for other, (work, timing) in known.items():
            slower = max(slowest.get(target, 1.0) / slowest.get(other, 1.0), 1.0)
            longest = max(longest, slower * work + max(slower * timing, limit))
        return (longest or limit) + self.again

    def record_gates(self, target: int, seconds: float, timing: float) -> None:
        """Record that a candidate of the search went through all gates of a target.

        The longest times are kept, because a resumed search reuses the steps of an earlier run.

        seconds: seconds of all gates
        timing: seconds of their timing, also where an earlier run made that step
        """
        timing = min(timing, seconds)
        gates = self._state["seconds_of_gates"]
        work, longest = gates.get(str(target), (0.0, 0.0))
        gates[str(target)] = [max(work, seconds - timing), max(longest, timing)]
        self._write()

    def find_want_of_time(self, budget: float, target: int, trials: Sequence[Trial]) -> str:
        """Return why no further trial of the search starts: one as long as the longest, and a
        confirmation after it, would end after the budget. "" if they would not.

        budget: seconds
        target: target of the next trial; the others that may be confirmed are those of kept trials
        """
        left, trial = budget - self.seconds, float(self._state["longest"])
        if left <= 0:
            return self.describe_spent(budget)
        kept = {t.candidate.target for t in trials if t.outcome == "kept"}
        needed = max(self.predict_confirmation(one, trials) for one in kept | {target})
        if left > trial + needed:
            return ""
        return (
            f"{left:.0f} s of search.budget.hours were left, a trial took up to {trial:.0f} s, and "
            f"a confirmation takes up to {needed:.0f} s, so that one more trial needs "
            f"{(self.seconds + trial + needed) / 3600:.2g} hours"
        )

    def describe_spent(self, budget: float) -> str:
        """Say that the search's budget, in seconds, is spent, and how many seconds were taken."""
        return f"search.budget.hours were spent ({self.seconds:.0f} s of {budget:.0f} s)"

    def find_want_of_confirmation(
        self, candidate: Candidate, budget: float, trials: Sequence[Trial]
    ) -> str:
        """Return why a candidate of the search cannot be confirmed within the budget; "" if it can.

        budget: seconds
        """
        left = budget - self.seconds
        needed = self.predict_confirmation(candidate.target, trials)
        if candidate == self.validated or left > needed:
            return ""
        return (
            f"not confirmed, which takes up to {needed:.0f} s: {max(left, 0):.0f} s of "
            "search.budget.hours were left"
        )

    @contextmanager
    def watch(self, what: str, budget: float, predicted: float) -> Iterator[None]:
        """Inside, say so once the search's budget ends, and record it in `over`.

        what: the step, such as "confirming rtn, onnxruntime-cpu"
        budget, predicted: seconds of the search, and those that the step may take
        """
        before = self.seconds
        late = f"search: search.budget.hours were spent during {what}, which is not interrupted"
        timer = threading.Timer(budget - before, say, (late,))
        timer.daemon = True
        if before < budget:  # else only steps that are reused
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            if before < budget < self.seconds:
                took = self.seconds - before
                self.over = f"{what} took {took:.0f} s, and up to {predicted:.0f} s were predicted"

    def decide(self, find_reason: Callable[[], str]) -> str:
        """Return why the search does not measure the modules, as an earlier run of this search
        decided.

        find_reason: function that decides where no earlier run did; it returns "" to measure them
        """
        if self._state["unmeasured"] is None:
            self._state["unmeasured"] = find_reason()
            self._write()
        return str(self._state["unmeasured"])

    def begin(self, candidate: str) -> str:
        """Record that a trial of the search begins; return the reason to skip it, "" to run it."""
        self._began = self._clock()
        steps = finished_steps(self._root)
        running = self._state["running"] or {}
        same = running.get("form") == candidate
        ends = running["ends"] + 1 if same and running["steps"] == steps else int(same)
        if ends >= ENDS:
            self._state["skipped"].append(candidate)
        skipped = candidate in self._state["skipped"]
        self._state["running"] = (
            None if skipped else {"form": candidate, "steps": steps, "ends": ends}
        )
        self._write()
        return WHY.format(file=f"{self._root}/{self._name}") if skipped else ""

    def end(self, number: int) -> None:
        """Record that the search's trial `number` (from 1) has ended; one that had ended before
        adds no time."""
        self._state["running"] = None
        if number > self.finished:
            longest = max(float(self._state["longest"]), self._clock() - self._began)
            self._state |= {"finished": number, "seconds": self.seconds, "longest": longest}
        self._since = self._clock()
        self._write()

    def interrupt(self) -> None:
        """Record that the search's trial was ended by an exception, such as Ctrl-C, not by the
        candidate."""
        self._state["running"] = None
        self._write()

    def _write(self) -> None:
        data = json.dumps(self._state).encode()
        if isinstance(self._root, SharedStore):
            self._root.write(self._name, data)
            return
        file = self._root / self._name
        with atomic.explain_disk_errors(file.parent, "--store"):
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(file, data)


def finished_steps(root: Root) -> int:
    """Count the finished steps of a search's store."""
    if isinstance(root, SharedStore):
        return root.count_steps()
    return sum(1 for _ in root.glob(f"*/*/{MADE_FROM}"))


def _slowest(trials: Sequence[Trial]) -> dict[int, float]:
    """Return {target: largest time of its trials / the recipe's} of a search."""
    slowest: dict[int, float] = {}
    for trial in trials:
        if trial.ratio is not None:
            target = trial.candidate.target
            slowest[target] = max(trial.ratio, slowest.get(target, 0.0))
    return slowest
