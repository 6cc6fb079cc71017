"""The settings with which a server carries most requests within its objectives, by measurement.

One setting after the other is doubled (or halved) while that carries more, the others being as
they were found so far. Of each value the highest rate is searched that meets the objectives
(highest_rate.py). A value is taken only if it met a rate that the value before was not shown to
meet. The best of many measurements is partly the luckiest, so at the end the settings found and
those at the start are measured once more, and what was found counts only if it carries more again.

    rows       of a batch; of a model that continues texts `slots`, its texts at once
    delay_ms   that a batch waits for more rows
    workers    batches that run at once, first of all: each then has fewer threads
    max_wait   of requests where more come than are answered: the longest with which those that are
               answered keep the objectives though OVERLOAD times as many come; the server's own
               value first, then half of what the objective leaves beside one batch, and so on
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from optimizer.foundation.verdicts import Verdict
from optimizer.harness.bounds import BATCH, DELAY_MS, SLOTS
from optimizer.load_test.highest_rate import HighestRate

OVERLOAD = 3.0  # times the highest rate

Values = Mapping[str, Any]  # of settings, by their names


@dataclass(frozen=True)
class Trial:
    """Settings, and the highest rate that met the objectives with them."""

    settings: Values
    highest: HighestRate


@dataclass
class Tuning:
    """A search. measure(settings): serves with them and searches. processors: of this machine, as
    many as workers can use. trials: all, in order."""

    measure: Callable[[Values], HighestRate]
    processors: int = 1
    trials: list[Trial] = field(default_factory=list)

    def best(self, start: Values) -> Trial:
        """The trial whose settings are to be used. start: those of the bundle."""
        best = first = self._tried(start)
        if "rows" in start:
            best = self._doubled(best, "workers", self.processors)
            best = self._doubled(best, "rows", BATCH)
            best = self._climbed(best, "delay_ms", _powers(DELAY_MS))
        else:
            best = self._doubled(best, "slots", SLOTS)
        if best is first:
            return first
        again, before = self._tried(best.settings), self._tried(first.settings)
        return again if better(again.highest, before.highest) else before

    def _tried(self, settings: Values) -> Trial:
        self.trials.append(Trial(settings, self.measure(settings)))
        return self.trials[-1]

    def _doubled(self, best: Trial, name: str, most: int) -> Trial:
        start = int(best.settings[name])
        up = (start << n for n in range(1, most.bit_length()) if start << n <= most)
        larger = self._climbed(best, name, up)
        if larger is not best:
            return larger
        return self._climbed(best, name, (start >> n for n in range(1, start.bit_length())))

    def _climbed(self, best: Trial, name: str, values: Iterable[int]) -> Trial:
        """Value after value, until one carries no more."""
        for value in values:
            tried = self._tried({**best.settings, name: value})
            if not better(tried.highest, best.highest):
                break
            best = tried
        return best


def better(new: HighestRate, old: HighestRate) -> bool:
    """Whether it met a rate that the other was not shown to meet."""
    if new.met is None:
        return False
    return old.met is None or (old.missed is not None and new.met >= old.missed)


def longest_wait(
    measure: Callable[[float | None], Verdict], limit: float, batch: float
) -> float | None:
    """Seconds that requests may wait; None: the server's own value keeps the objectives.

    measure(wait): a run with too many requests. limit: seconds of the objective. batch: of a full
    batch, or a step of all texts. Raises LookupError where no wait as long as a batch keeps them.
    """
    if measure(None) == "pass":
        return None
    wait = (limit - batch) / 2
    while wait >= batch:
        if measure(round(wait, 6)) == "pass":  # microseconds are as fine as it can matter
            return round(wait, 6)
        wait /= 2
    raise LookupError


def _powers(most: int) -> Iterator[int]:
    value = 1
    while value <= most:
        yield value
        value *= 2
