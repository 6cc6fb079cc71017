"""Search for the highest rate that meets the objectives, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optimizer.foundation.verdicts import Verdict

PRECISION = 1.1  # maximum of missed / met at the end
LOWEST, HIGHEST = 0.01, 100_000.0  # requests a second
RUNS = 5, 12
"""Fewest and most runs of a usual search: 2 to 9 that double or halve, 3 that reach PRECISION."""


@dataclass(frozen=True)
class HighestRate:
    """Result of a search, in requests per second.

    met: highest rate at which the objectives were met; None: no rate that was tried
    missed: lowest rate that was tried and not shown to meet them; None: all tried rates met them
    undecided: True if the run at `missed` was too short to show that it misses them
    """

    met: float | None
    missed: float | None
    undecided: bool = False

    @property
    def verdict(self) -> Verdict:
        """Verdict on the search for the highest rate: pass if any tried rate met the objectives."""
        if self.met is not None:
            return "pass"
        return "inconclusive" if self.undecided else "fail"


def search(measure: Callable[[float], Verdict], start: float, least: float = LOWEST) -> HighestRate:
    """Search for the highest request rate that a server sustains: double or halve `start` until one
    rate meets the objectives and another does not; then try the geometric mean of the two,
    repeatedly. An inconclusive run counts as missed.

    measure: rate -> verdict of a run
    least: lowest rate to try
    """
    met = missed = None
    undecided, rate = False, max(start, least)
    while met is None or missed is None:
        verdict = measure(rate)
        if verdict == "pass":
            met = rate
            rate = 2 * rate if missed is None else rate
        else:
            missed, undecided = rate, verdict == "inconclusive"
            rate = max(rate / 2, least) if met is None else rate
        if (missed == least and met is None) or rate > HIGHEST:
            return HighestRate(met, missed, undecided)
    while missed / met > PRECISION:
        rate = (met * missed) ** 0.5
        verdict = measure(rate)
        if verdict == "pass":
            met = rate
        else:
            missed, undecided = rate, verdict == "inconclusive"
    return HighestRate(met, missed, undecided)
