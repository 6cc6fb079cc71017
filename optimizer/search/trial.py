"""Record of one trial of a search, and the Pareto set of several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from optimizer.search.candidates import Candidate

Outcome = Literal["kept", "undecided", "stopped", "refused"]
"""kept: surely within the margins on the search's rows, and not surely beyond a limit; undecided:
not surely within a margin; stopped: surely beyond a margin or limit; refused: it cannot be made."""
Interval = tuple[float | None, float | None]


@dataclass(frozen=True)
class Trial:
    """Result of one candidate's trial in a search; a figure that was not measured is None.

    why: reason of `outcome`, a sentence
    kept: modules in higher precision
    size: bytes of the model's files
    drop, drop_interval: drop of the metric on the answered rows, and its interval
    rows: number of the search's rows that were answered
    alpha: error probability of each side of drop_interval
    gates: gates that were judged on these rows
    ratio, ratio_interval: time divided by the recipe's time, timed in turns, and its interval
    p50, p99: percentiles of the time in milliseconds
    modules: {module: ms} in ONNX Runtime's profile
    expected: {"objective", "error"} as predicted before the trial; without "error" before the
        modules were measured
    """

    candidate: Candidate
    label: str
    outcome: Outcome
    why: str = ""
    kept: tuple[str, ...] = ()
    size: int | None = None
    drop: float | None = None
    drop_interval: Interval = (None, None)
    rows: int = 0
    alpha: float | None = None
    gates: tuple[dict[str, Any], ...] = ()
    ratio: float | None = None
    ratio_interval: Interval = (None, None)
    p50: float | None = None
    p99: float | None = None
    modules: Mapping[str, float] | None = None
    expected: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def figures(self) -> tuple[float, ...]:
        """Measured figures that the Pareto set compares, each better if lower: drop, size, time."""
        known = (self.drop, self.size, self.ratio)
        return tuple(float(value) for value in known if value is not None)

    @property
    def drop_text(self) -> str:
        """Drop of a search's trial and its interval as text; "" if it was not measured."""
        return "" if self.drop is None else write_interval(self.drop, self.drop_interval, 4)

    @property
    def ratio_text(self) -> str:
        """Ratio of times of a search's trial and its interval as text; "" if it was not timed."""
        return "" if self.ratio is None else write_interval(self.ratio, self.ratio_interval, 3)

    @property
    def summary(self) -> str:
        """Trial of a search on one line: outcome, figures and reason."""
        known = [f"drop {self.drop_text}"] if self.drop is not None else []
        known += [f"{self.ratio_text} of the recipe's time"] if self.ratio is not None else []
        known += [f"{self.size / 1e6:.1f} MB"] if self.size is not None else []
        return "; ".join([self.outcome, *known, *filter(None, [self.why])])


def write_interval(value: float, interval: Sequence[float | None], digits: int) -> str:
    """Write a figure of a search's trial and its interval; without one that has no width; "?" for
    an unknown end."""
    low, high = ("?" if end is None else f"{end:.{digits}f}" for end in interval)
    return f"{value:.{digits}f}" + ("" if low == high else f" ({low} to {high})")


def get_objective(trial: Trial, name: str) -> float | None:
    """Return a trial's figure that the search minimizes; None if it was not measured.

    name: value of search.objective
    """
    return {"size": trial.size, "quality": trial.drop}.get(name, trial.ratio)


def order_for_confirmation(trials: Sequence[Trial], name: str) -> list[Trial]:
    """Order kept trials for the tests on held-out rows, of which each has less error to spend than
    the one before.

    Next, of the trials that are not surely worse than any other left, is the one with the lowest
    upper bound of its drop, which is most likely to pass. Of times, those that are surely shorter
    than the recipe's come first: beside one with a wide interval, none is surely longer.

    name: value of search.objective
    """
    left, ordered = sorted(trials, key=lambda t: _value_and_bound(t, name)), []
    while left:
        # of the fastest alone the interval may be wide enough to include all others
        alike = [t for t in left if not any(_is_surely_worse(t, one, name) for one in left)]
        following = min(alike, key=lambda t: (not _is_surely_faster(t, name), _bound_of_drop(t)))
        left.remove(following)
        ordered.append(following)
    return ordered


def _value_and_bound(trial: Trial, name: str) -> tuple[float, float]:
    value = get_objective(trial, name)
    return (math.inf if value is None else value, _bound_of_drop(trial))


def _bound_of_drop(trial: Trial) -> float:
    high = trial.drop_interval[1]
    return math.inf if high is None else high


def _is_surely_faster(trial: Trial, name: str) -> bool:
    """Return True if the objective of a search's trial is a time that is surely shorter than the
    recipe's."""
    high = trial.ratio_interval[1]
    return name not in ("size", "quality") and high is not None and high < 1


def _is_surely_worse(trial: Trial, other: Trial, name: str) -> bool:
    """Return True if the time of a search's trial is surely longer, or its size or drop larger."""
    if name not in ("size", "quality"):
        low, high = trial.ratio_interval[0], other.ratio_interval[1]
        return low is not None and high is not None and low > high
    return _value_and_bound(trial, name)[0] > _value_and_bound(other, name)[0]


def find_pareto_set(trials: Sequence[Trial]) -> list[Trial]:
    """List the kept trials that no other kept one beats: at most as high in every figure, and lower
    in one."""
    kept = [t for t in trials if t.outcome == "kept"]
    return [t for t in kept if not any(beats(other, t) for other in kept)]


def beats(one: Trial, other: Trial) -> bool:
    """Compare two trials of a search: return True if `one` is at most as high as `other` in every
    figure, and lower in one."""
    pairs = list(zip(one.figures, other.figures, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
