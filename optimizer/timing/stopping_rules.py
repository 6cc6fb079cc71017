"""Stopping rules of timing: take as few rounds as decide a speed gate, within a bound of seconds.

A gate asks if a quantile (the median of a ratio, the 99th percentile of a time) lies below its
limit. It is decided when the limit lies outside the quantile's interval between two order
statistics (harness/bundle/bench.py). Until then timing continues.

Several looks at the data err more often than one: at a ratio of exactly 1, each look has its own
chance of an interval that misses 1. So the looks share the error probability alpha. Look
k = 1, 2, ... comes after first * 2^(k - 1) rounds, with an interval that misses the quantile with
probability at most

    alpha_k = alpha / (k (k + 1)) = alpha (1 / k - 1 / (k + 1)),    alpha_1 + alpha_2 + ... = alpha

By the union bound the chance that any of the intervals misses, for any number of looks and any
reason to stop, is at most alpha = 1 - CONFIDENCE, half of it on each side: a quantile at its limit
passes with probability at most alpha / 2, and fails with no more. (Alpha spending: Lan and DeMets
1983, Biometrika 70, 659-663; this schedule needs no last look.) The bound holds because the numbers
of rounds are fixed before any is timed: the end of the time adds no look, and time decides only if
the next stage is begun.

`first` is the recipe's number of iterations, or the fewest rounds whose order statistics can bound
the quantile at alpha_1. Without a bound of seconds there is a single look, at all of alpha.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from optimizer.harness.bounds import CONFIDENCE, fewest
from optimizer.harness.bundle.bench import percentile, percentile_interval

FURTHEST = 16  # doublings that `needed` searches
Clock = Callable[[], float]


@dataclass(frozen=True)
class QuantileQuestion:
    """Question of a gate: does the `percent` quantile of the samples lie below the limit?

    per_round: number of samples per round
    """

    percent: float
    limit: float
    per_round: int = 1

    def first(self, iterations: int, confidence: float) -> int:
        """Return the larger of `iterations` and the fewest rounds that can bound the quantile."""
        return max(iterations, math.ceil(fewest(self.percent, confidence) / self.per_round))


def confidence_of(look: int, single: bool = False) -> float:
    """Return the confidence of the interval at look 1, 2, ...; CONFIDENCE for a single look."""
    return CONFIDENCE if single else 1 - (1 - CONFIDENCE) / (look * (look + 1))


@dataclass(frozen=True)
class Look:
    """One interim interval, after `rounds` rounds."""

    rounds: int
    confidence: float
    interval: tuple[float | None, float | None]


class SequentialTest:
    """Rule for the rounds that one question takes. The clock starts at construction.

    iterations: rounds of the first look, at least
    seconds: time within which further looks must come; None: `iterations` rounds, a single look
    warmup: rounds that are timed first and do not count
    """

    def __init__(
        self,
        question: QuantileQuestion,
        iterations: int,
        seconds: float | None,
        clock: Clock = time.monotonic,
        warmup: int = 0,
    ) -> None:
        self.question, self.seconds, self._clock, self._warmup = question, seconds, clock, warmup
        self._single = seconds is None
        first = question.first(iterations, confidence_of(1))
        self._first = iterations if self._single else first
        self._started = clock()
        self._samples: Sequence[float] = ()
        self.looks: list[Look] = []

    def more(self, samples: Sequence[float]) -> int:
        """Number of rounds to run after those that gave `samples`: 0 when the question is decided,
        or the next look would not be reached in time."""
        self._samples = samples
        done = self._done
        if done == self._next:
            confidence = confidence_of(len(self.looks) + 1, self._single)
            interval = percentile_interval(samples, self.question.percent, confidence)
            self.looks.append(Look(done, confidence, interval))
        if self.seconds is None or self.decided:
            return 0
        left = self._next - done
        return left if self._seconds_of(self._next) <= self.seconds else 0

    @property
    def _done(self) -> int:
        return len(self._samples) // self.question.per_round

    @property
    def _next(self) -> int:
        return self._first << len(self.looks)

    def _seconds_of(self, rounds: int) -> float:
        """Predict the seconds of `rounds` rounds in all from the rounds so far."""
        each = (self._clock() - self._started) / max(self._done + self._warmup, 1)
        return each * (rounds + self._warmup)

    @property
    def interval(self) -> tuple[float | None, float | None]:
        return self.looks[-1].interval if self.looks else (None, None)

    @property
    def decided(self) -> bool:
        low, high = self.interval
        limit = self.question.limit
        return (high is not None and high < limit) or (low is not None and low > limit)

    def needed(self) -> dict[str, float] | None:
        """Predict {"rounds", "seconds"}, in total, that decide the question; None if more than
        FURTHEST doublings are needed. An interval shrinks with the root of its rounds, and widens
        as later looks have a higher confidence."""
        if not self.looks:
            return self._with_seconds(self._first)
        last, (low, high) = self.looks[-1], self.interval
        middle = percentile(self._samples, self.question.percent)
        gap = abs(middle - self.question.limit)
        end = high if middle < self.question.limit else low
        if end is None:
            return self._with_seconds(2 * self._next)
        for ahead in range(1, FURTHEST + 1):
            rounds, look = last.rounds << ahead, len(self.looks) + ahead
            surer = _deviations(confidence_of(look)) / _deviations(last.confidence)
            if abs(end - middle) * surer * math.sqrt(last.rounds / rounds) < gap:
                return self._with_seconds(rounds)
        return None

    def _with_seconds(self, rounds: int) -> dict[str, float]:
        return {"rounds": rounds, "seconds": self._seconds_of(rounds)}

    def as_dict(self) -> dict[str, Any]:
        """Return fields of the report: interval, looks, and the rounds `needed` to decide, searched
        up to `reckoned` rounds."""
        return {
            "interval": list(self.interval),
            "looks": [
                {"rounds": one.rounds, "confidence": one.confidence, "interval": [*one.interval]}
                for one in self.looks
            ],
            "needed": None if self.decided else self.needed(),
            "reckoned": (self.looks[-1].rounds if self.looks else self._first) << FURTHEST,
        }


def _deviations(confidence: float) -> float:
    """Half the width of a normal interval, in standard deviations."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


class PrecisionRule:
    """Double the rounds until the median is known to within `share` of itself, or the next doubling
    would exceed `seconds`. For medians that no gate judges."""

    def __init__(self, share: float, seconds: float, clock: Clock = time.monotonic) -> None:
        self._share, self._seconds, self._clock = share, seconds, clock
        self._started = clock()

    def more(self, samples: Sequence[float]) -> int:
        """Number of rounds to run after those that gave `samples`: the same number, or 0."""
        low, high = percentile_interval(samples, 50)
        if low is not None and high is not None and high - low <= self._share * (high + low):
            return 0
        spent = self._clock() - self._started
        return len(samples) if 2 * spent <= self._seconds else 0

    def as_dict(self) -> dict[str, Any]:
        """Return {}: this rule adds no field to the report."""
        return {}


StoppingRule = SequentialTest | PrecisionRule


class TimeBudget:
    """Share latency.max_seconds among questions: each may take an equal part of the time that is
    left. seconds: 0: every question takes its iterations and no more."""

    def __init__(self, seconds: float, questions: int, clock: Clock = time.monotonic) -> None:
        self._single = seconds <= 0
        self._left, self._questions, self._clock = seconds, questions, clock
        self._started: float | None = None

    def test(self, question: QuantileQuestion, iterations: int, warmup: int = 0) -> SequentialTest:
        """Return the test of the next question; the test before it must have ended."""
        now = self._clock()
        if self._started is not None:
            self._left -= now - self._started
        self._started = now
        share = self._left / self._questions
        self._questions -= 1
        seconds = None if self._single else share
        return SequentialTest(question, iterations, seconds, self._clock, warmup)
