"""The highest rate that meets the objectives, found by halving an interval of rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optimizer.foundation.verdicts import Verdict

PRECISION = 1.1  # between the rate that was met and the next one that was not
LOWEST, HIGHEST = 0.01, 100_000.0  # requests a second


@dataclass(frozen=True)
class HighestRate:
    """met: the highest rate at which the objectives were met, None for none. missed: the lowest
    above it at which they were not shown to be met, None where none was tried."""

    met: float | None
    missed: float | None


def search(measure: Callable[[float], Verdict], start: float, least: float = LOWEST) -> HighestRate:
    """Double or halve `start` until one rate meets the objectives and another does not; then halve
    what is between them, by ratio. A rate that decides nothing counts as one that does not. least:
    the lowest rate that is tried."""
    met = missed = None
    rate = max(start, least)
    while met is None or missed is None:
        if measure(rate) == "pass":
            met = rate
            rate = 2 * rate if missed is None else rate
        else:
            missed = rate
            rate = max(rate / 2, least) if met is None else rate
        if (missed == least and met is None) or rate > HIGHEST:
            return HighestRate(met, missed)
    while missed / met > PRECISION:
        rate = (met * missed) ** 0.5
        if measure(rate) == "pass":
            met = rate
        else:
            missed = rate
    return HighestRate(met, missed)
