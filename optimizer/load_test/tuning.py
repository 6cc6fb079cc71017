"""Search, by measurement, for the server settings with the highest rate within the objectives.

One setting after the other is doubled (or halved) while the highest rate that meets the objectives
(highest_rate.py) increases; the other settings keep their best values so far. A value is taken only
if it met a rate that the value before was not shown to meet. The best of many measurements is
partly luck, so the best settings and those at the start are measured once more at the end, and the
best settings count only if they win again.

    workers    batches that run at once; tuned first, because each then has fewer threads
    rows       rows of a batch (text-generation: `slots`, the requests decoded at once)
    delay_ms   time that a batch waits for more rows
    max_wait   longest wait with which the answered requests keep the objectives at OVERLOAD times
               the highest rate: the server's own value first, then half of the time that the
               objective leaves beside one batch, then half of that, and so on
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from optimizer.foundation.verdicts import Verdict
from optimizer.harness.bounds import BATCH, DELAY_MS, SLOTS
from optimizer.load_test.highest_rate import HighestRate

OVERLOAD = 3.0  # times the highest rate

Values = Mapping[str, Any]  # {setting: value}


@dataclass(frozen=True)
class TuningTrial:
    """Settings of a server under load test, and the highest rate that meets the objectives with
    them."""

    settings: Values
    highest: HighestRate


@dataclass
class Tuning:
    """One search for the best settings of a server.

    measure: settings -> highest rate that meets the objectives
    processors: maximum number of workers to try
    trials: all trials, in order
    """

    measure: Callable[[Values], HighestRate]
    processors: int = 1
    trials: list[TuningTrial] = field(default_factory=list)

    def best(self, start: Values) -> TuningTrial:
        """Search for the best settings of a server, and return their trial. start: settings of the
        bundle."""
        best = first = self._try(start)
        if "rows" in start:
            best = self._double(best, "workers", self.processors)
            best = self._double(best, "rows", BATCH)
            best = self._climb(best, "delay_ms", _powers(DELAY_MS))
        else:
            best = self._double(best, "slots", SLOTS)
        if best is first:
            return first
        again, before = self._try(best.settings), self._try(first.settings)
        return again if is_better(again.highest, before.highest) else before

    def _try(self, settings: Values) -> TuningTrial:
        self.trials.append(TuningTrial(settings, self.measure(settings)))
        return self.trials[-1]

    def _double(self, best: TuningTrial, name: str, most: int) -> TuningTrial:
        """Return the best trial after doubling a setting of the server or, if that is not better,
        halving it."""
        start = int(best.settings[name])
        up = (start << n for n in range(1, most.bit_length()) if start << n <= most)
        larger = self._climb(best, name, up)
        if larger is not best:
            return larger
        return self._climb(best, name, (start >> n for n in range(1, start.bit_length())))

    def _climb(self, best: TuningTrial, name: str, values: Iterable[int]) -> TuningTrial:
        """Try values of a server's setting in order until a trial is not better than `best`; return
        the best trial."""
        for value in values:
            trial = self._try({**best.settings, name: value})
            if not is_better(trial.highest, best.highest):
                break
            best = trial
        return best


def is_better(new: HighestRate, old: HighestRate) -> bool:
    """Return True if a server's settings `new` met a request rate that `old` was not shown to
    meet."""
    if new.met is None:
        return False
    return old.met is None or (old.missed is not None and new.met >= old.missed)


def find_longest_wait(
    measure: Callable[[float | None], Verdict], limit: float, batch: float
) -> float | None:
    """Find the longest max_wait, in seconds, with which the objectives are met. None: they are met
    with the max_wait that the server chooses by itself.

    Raises LookupError if no tried wait of at least `batch` seconds meets them.

    measure: max_wait in seconds, or None: the server's own -> verdict of a run under overload
    limit: limit of the objective in seconds
    batch: seconds of a full batch, or of a decode step with all slots in use
    """
    if measure(None) == "pass":
        return None
    wait = (limit - batch) / 2
    while wait >= batch:
        if measure(round(wait, 6)) == "pass":  # to the microsecond
            return round(wait, 6)
        wait /= 2
    raise LookupError


def _powers(most: int) -> Iterator[int]:
    value = 1
    while value <= most:
        yield value
        value *= 2
