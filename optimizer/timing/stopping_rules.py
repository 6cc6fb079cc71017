"""Stopping rules of timing: take as few rounds as decide a speed gate, within a bound of seconds.

A gate asks if a quantile (such as the 99th percentile of a time) or a ratio of two times lies below
its limit. It is decided when the limit lies outside its interval: of a quantile, that between two
order statistics (harness/bundle/bench.py); of a ratio, Student's of the ratios in several openings
of both systems. Until then timing continues.

The rounds of one opening are not a sample of a ratio: the places of two sessions in memory make one
of them faster in all rounds alike. (Kalibera and Jones 2013, ISMM, section 5: repeat at the
highest level that varies.)

Several looks at the data err more often than one: at a ratio of exactly 1, each look has its own
chance of an interval that misses 1. So the looks share the error probability alpha. InterimInterval
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
the quantile at alpha_1; of a ratio, OPENINGS openings that share the iterations. Without a bound of
seconds there is a single look, at all of alpha.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, stdev
from typing import Any

from optimizer.harness.bounds import CONFIDENCE, fewest
from optimizer.harness.bundle.bench import percentile, percentile_interval

FURTHEST = 16  # doublings that `needed` searches
OPENINGS = 3
"""Openings of the first look at a ratio. Where each session has one of two speeds, up to 1/4 of the
openings have the lowest ratio of equal systems. All n openings have it, and so no spread, with
probability (1/4)^n, which must not exceed alpha / 2 = 2.5 %."""
Clock = Callable[[], float]
Interval = tuple[float | None, float | None]


@dataclass(frozen=True)
class QuantileQuestion:
    """Question of a gate: does the `percent` quantile of the samples lie below the limit?

    percent: quantile in percent, such as 99
    limit: limit in the unit of the samples
    per_round: number of samples per round
    """

    percent: float
    limit: float
    per_round: int = 1
    rounds: int = 1

    def first(self, iterations: int, confidence: float | None) -> int:
        """Return the number of rounds before the first look.

        This is the larger of `iterations` and the fewest rounds that can bound the quantile.

        confidence: confidence of the first interval; None: a single look after `iterations` rounds
        """
        if confidence is None:
            return iterations
        return max(iterations, math.ceil(fewest(self.percent, confidence) / self.per_round))

    def counts(self, samples: int) -> dict[str, float]:
        """Return the report's counts for a number of samples: one round each."""
        return {"rounds": samples}

    def middle(self, samples: Sequence[float]) -> float:
        return percentile(samples, self.percent)

    def interval(self, samples: Sequence[float], confidence: float) -> Interval:
        return percentile_interval(samples, self.percent, confidence)

    def deviations(self, samples: int, confidence: float) -> float:
        """Return half the width of an interval from `samples` samples, up to a constant factor.

        The unit is the standard deviation of the samples.
        """
        return NormalDist().inv_cdf((1 + confidence) / 2) / math.sqrt(samples)


@dataclass(frozen=True)
class RatioQuestion:
    """Question of a gate: is the time of one system, divided by another's, below the limit?

    A sample is the ratio of two medians, each over the rounds of one opening of a system.

    rounds: rounds per opening
    """

    limit: float
    rounds: int
    per_round: int = 1

    @classmethod
    def share_rounds(cls, limit: float, iterations: int) -> RatioQuestion:
        """Return the question whose first look spreads `iterations` rounds over its openings.

        Each opening has an even number of rounds, because every second round reverses the order of
        the systems (bench.order_systems).
        """
        return cls(limit, 2 * math.ceil(iterations / (2 * OPENINGS)))

    def first(self, iterations: int, confidence: float | None) -> int:  # noqa: ARG002
        """Return how many openings of the systems are timed before the first interim test."""
        return OPENINGS

    @staticmethod
    def iterations(opening: int) -> int:
        """Return how many rounds are timed before the first interim test.

        opening: rounds that are timed each time both models are opened
        """
        return OPENINGS * opening

    def samples(self, ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
        """Return the ratio of each finished opening. ours, theirs: time of each round"""
        parts = range(0, len(ours) - self.rounds + 1, self.rounds)
        medians = [[median(t[i : i + self.rounds]) for i in parts] for t in (ours, theirs)]
        return [own / other for own, other in zip(*medians, strict=True)]

    def counts(self, samples: int) -> dict[str, float]:
        """Return {"rounds", "openings"} of a number of samples, for the report."""
        return {"rounds": samples * self.rounds, "openings": samples}

    def middle(self, samples: Sequence[float]) -> float:
        """Return the geometric mean of the ratios."""
        return math.exp(fmean(map(math.log, samples)))

    def interval(self, samples: Sequence[float], confidence: float) -> Interval:
        """Return Student's interval of the geometric mean; (None, None) below two ratios."""
        if len(samples) < 2:
            return None, None
        logs = [math.log(sample) for sample in samples]
        half = stdev(logs) * self.deviations(len(logs), confidence)
        return math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)

    def deviations(self, samples: int, confidence: float) -> float:
        """Return half the width of an interval, in standard deviations of the logarithms."""
        return student_quantile((1 + confidence) / 2, samples - 1) / math.sqrt(samples)


Question = QuantileQuestion | RatioQuestion


def student_quantile(probability: float, freedom: int) -> float:
    """Compute a quantile of Student's t distribution, by bisection to the last bits.

    probability: above 1/2 and below 1
    freedom: degrees of freedom

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """

    def both_sides(angle: float) -> float:
        """P(|t| < tan(angle) * sqrt(freedom))."""
        square, odd = math.cos(angle) ** 2, freedom % 2
        term, terms = (math.cos(angle) if odd else 1.0), 0.0
        for k in range(1 + odd, freedom, 2):
            terms += term
            term *= square * k / (k + 1)
        if odd:
            return 2 / math.pi * (angle + math.sin(angle) * terms)
        return math.sin(angle) * terms

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if both_sides(middle) < 2 * probability - 1 else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def confidence_of(look: int, single: bool = False) -> float:
    """Return the confidence of the interval at look 1, 2, ...

    single: True for a test with one look, which gets all of CONFIDENCE
    """
    return CONFIDENCE if single else 1 - (1 - CONFIDENCE) / (look * (look + 1))


@dataclass(frozen=True)
class InterimInterval:
    """Interval at one interim test. rounds: rounds, or openings of a ratio, so far"""

    rounds: int
    confidence: float
    interval: Interval


class SequentialTest:
    """Sequential test of one question, which decides how many rounds to time.

    Its clock starts when it is made.

    iterations: minimum rounds before the first look
    seconds: time limit for further looks; None: a single look after `iterations` rounds
    warmup: rounds that are timed first and do not count
    """

    def __init__(
        self,
        question: Question,
        iterations: int,
        seconds: float | None,
        clock: Clock = time.monotonic,
        warmup: int = 0,
    ) -> None:
        self.question, self.seconds, self._clock, self._warmup = question, seconds, clock, warmup
        self._single = seconds is None
        self._first = question.first(iterations, None if self._single else confidence_of(1))
        self._started = clock()
        self._samples: Sequence[float] = ()
        self.looks: list[InterimInterval] = []

    def more(self, samples: Sequence[float]) -> int:
        """Return the number of further rounds to run.

        0 if the question is decided, or if the next look would come too late.

        samples: samples of all rounds so far
        """
        self._samples = samples
        done = self._done
        if done == self._next:
            confidence = confidence_of(len(self.looks) + 1, self._single)
            interval = self.question.interval(samples, confidence)
            self.looks.append(InterimInterval(done, confidence, interval))
        if self.decided or (self._single and self.looks):
            return 0
        left = (self._next - done) * self.question.rounds
        in_time = self.seconds is None or self._seconds_of(self._next) <= self.seconds
        return left if in_time else 0

    @property
    def _done(self) -> int:
        return len(self._samples) // self.question.per_round

    @property
    def _next(self) -> int:
        return self._first << len(self.looks)

    def _seconds_of(self, rounds: int) -> float:
        """Predict the seconds of `rounds` rounds in total from those timed so far."""
        each = (self._clock() - self._started) / max(self._done + self._warmup, 1)
        return each * (rounds + self._warmup)

    @property
    def interval(self) -> Interval:
        """Interval at the last interim test; (None, None) before the first."""
        return self.looks[-1].interval if self.looks else (None, None)

    @property
    def decided(self) -> bool:
        """True if the limit lies outside the last interval."""
        low, high = self.interval
        limit = self.question.limit
        return (high is not None and high < limit) or (low is not None and low > limit)

    def needed(self) -> dict[str, float] | None:
        """Predict {"rounds", "seconds"}, of a ratio also "openings", in total until a decision.

        The width of an interval shrinks with the root of its rounds, and grows with the confidence
        of later looks. None if more than FURTHEST doublings are needed.
        """
        if not self.looks:
            return self._with_seconds(self._first)
        last, (low, high) = self.looks[-1], self.interval
        last_width = (last.rounds, last.confidence)
        middle = self.question.middle(self._samples)
        gap = abs(middle - self.question.limit)
        end = high if middle < self.question.limit else low
        if end is None:
            return self._with_seconds(2 * self._next)
        for ahead in range(1, FURTHEST + 1):
            done, confidence = last.rounds << ahead, confidence_of(len(self.looks) + ahead)
            wide = self.question.deviations(done, confidence)
            if abs(end - middle) * wide / self.question.deviations(*last_width) < gap:
                return self._with_seconds(done)
        return None

    def _with_seconds(self, done: int) -> dict[str, float]:
        return {**self.question.counts(done), "seconds": self._seconds_of(done)}

    def as_dict(self) -> dict[str, Any]:
        """Return fields of the report: interval, looks, and the rounds `needed` to decide, searched
        up to `reckoned` rounds."""
        each = self.question.rounds
        return {
            "interval": list(self.interval),
            "looks": [
                {
                    "rounds": one.rounds * each,
                    "confidence": one.confidence,
                    "interval": [*one.interval],
                }
                for one in self.looks
            ],
            "needed": None if self.decided else self.needed(),
            "reckoned": each * (self.looks[-1].rounds if self.looks else self._first) << FURTHEST,
        }


class PrecisionRule:
    """Stopping rule for medians that no gate judges.

    Rounds are doubled until the interval of the median is narrow enough, or time is up.

    share: half the width of the interval, divided by the median
    seconds: time limit, counted from when the rule is made
    """

    def __init__(self, share: float, seconds: float, clock: Clock = time.monotonic) -> None:
        self._share, self._seconds, self._clock = share, seconds, clock
        self._started = clock()

    def more(self, samples: Sequence[float]) -> int:
        """Return the number of further rounds: the number of `samples` so far, or 0 to stop."""
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
    """Seconds shared among questions, each of which may take an equal part of the rest.

    seconds: latency.max_seconds; 0: every question takes its iterations and no more
    """

    def __init__(self, max_seconds: float, questions: int, clock: Clock = time.monotonic) -> None:
        self._single = max_seconds <= 0
        self._left, self._questions, self._clock = max_seconds, questions, clock
        self._started: float | None = None

    def test(self, question: Question, iterations: int, warmup: int = 0) -> SequentialTest:
        """Return the test of the next question; the test before it must have ended."""
        now = self._clock()
        if self._started is not None:
            self._left -= now - self._started
        self._started = now
        share = self._left / self._questions
        self._questions -= 1
        seconds = None if self._single else share
        return SequentialTest(question, iterations, seconds, self._clock, warmup)
