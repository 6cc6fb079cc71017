"""Time cells of several systems in turns until the speed gates are decided.

A cell is (batch, tokens of an input or prompt). A `CellTimer` times one cell, and names the times
that decide; batch_timing.py and generation_timing.py have one each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from optimizer.recipe.schema import Latency
from optimizer.timing.stopping_rules import (
    QuantileQuestion,
    RatioQuestion,
    SequentialTest,
    TimeBudget,
)

CANDIDATE = "candidate"
Cell = tuple[int, int]
MoreRounds = Callable[[Mapping[str, Sequence[Any]]], int]


class CellTimer(Protocol):
    """Measurement of cells of one kind of task.

    percentiles: key of a system's percentiles in a measured cell by which systems are compared
    warmup: number of rounds before those that count
    per_round: number of samples of a round
    """

    @property
    def percentiles(self) -> str: ...

    @property
    def warmup(self) -> int: ...

    @property
    def per_round(self) -> int: ...

    def time(
        self,
        systems: Mapping[str, Any],
        cell: Cell,
        baseline: str = "",
        more: MoreRounds | None = None,
        opening: int = 0,
    ) -> dict[str, Any]:
        """Time `systems` in turns. Returns a document with one cell.

        baseline: system that ratios are to; "": no ratios
        more: function (times so far) -> rounds to run next; None: the recipe's iterations
        opening: rounds after which the systems are opened again; 0: never
        """
        ...

    def ratio(self, measured: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the ratio to the baseline by which must_beat_float is judged, of a measured
        cell."""
        ...

    def milliseconds(self, round_: Any) -> float:
        """Return the time of one round of a timed cell, in ms."""
        ...

    def samples(self, rounds: Sequence[Any]) -> list[float]:
        """Return the times in ms of a timed cell whose 99th percentile is judged."""
        ...


@dataclass(frozen=True)
class Timing:
    """Settings of one timing run of candidate and baselines.

    threads: number of threads of each system
    questions: number of questions that share latency.max_seconds (see count_questions)
    """

    latency: Latency
    threads: int
    questions: int


def time_cells(
    timer: CellTimer,
    systems: Mapping[str, Any],
    cells: Sequence[Cell],
    timing: Timing,
    floats: Sequence[str],
) -> dict[str, Any]:
    """Time every cell until its gate is decided, then the candidate alone for its 99th percentile.

    Once the candidate is surely slower than float in one cell, which fails must_beat_float, the
    other cells get the recipe's iterations and no more.

    systems: {name: system}
    floats: names of the float baselines; the candidate is compared with the fastest of them. []: no
        ratios are measured

    Returns a document with all cells, `p99` where the recipe limits it, and the `seconds` of this.
    """
    latency, started = timing.latency, time.monotonic()
    budget = TimeBudget(latency.max_seconds, timing.questions)
    section: dict[str, Any] = {}
    gated = latency.must_beat_float
    for cell in cells:
        baseline = _fastest(timer, systems, floats, cell)
        if baseline:
            below_1, least = RatioQuestion.share_rounds(1.0, latency.iterations), latency.iterations
            rule = budget.test(below_1, least) if gated else SequentialTest(below_1, least, None)
            compared = TimingComparison(timer, rule, baseline)
            measured = timer.time(systems, cell, baseline, compared.more, compared.opening)
            ratio = timer.ratio(measured["cells"][0])
            ratio |= compared.as_dict()
            gated = gated and (rule.interval[0] or 0.0) < 1
        else:
            measured = timer.time(systems, cell)
        section = {**measured, "cells": [*section.get("cells", ()), *measured["cells"]]}
    if latency.p99_ms is not None:
        question = QuantileQuestion(99, latency.p99_ms, timer.per_round)
        stopping = budget.test(question, latency.iterations, timer.warmup)
        alone = {CANDIDATE: systems[CANDIDATE]}
        measured = timer.time(alone, cells[0], more=_times(timer, stopping))
        percentiles = measured["cells"][0]["systems"][CANDIDATE][timer.percentiles]
        fields = stopping.as_dict()
        section["p99"] = {**percentiles, **fields, "p99_interval": fields.pop("interval")}
    return {**section, "seconds": time.monotonic() - started}


def _fastest(timer: CellTimer, systems: Mapping[str, Any], names: Sequence[str], cell: Cell) -> str:
    """Return the name of the fastest of the systems `names` in `cell`, by rounds that no gate uses;
    "" where `names` is empty."""
    if len(names) < 2:
        return "".join(names)
    (measured,) = timer.time({name: systems[name] for name in names}, cell)["cells"]
    return min(names, key=lambda n: float(measured["systems"][n][timer.percentiles]["p50"]))


class TimingComparison:
    """Decides how many rounds to run until it is known if the candidate's time / another system's
    is below a limit.

    rule: stopping rule of a RatioQuestion
    baseline: name of the other system
    """

    def __init__(self, timer: CellTimer, rule: SequentialTest, baseline: str) -> None:
        assert isinstance(rule.question, RatioQuestion)
        self._timer, self.rule, self._baseline = timer, rule, baseline
        self._question = rule.question
        self._times: Mapping[str, Sequence[Any]] = {}

    @property
    def opening(self) -> int:
        """Number of rounds between two openings of the timed systems."""
        return self._question.rounds

    def more(self, times: Mapping[str, Sequence[Any]]) -> int:
        """Return the number of rounds to run next; 0 ends the timing.

        times: {system: times of its rounds so far}
        """
        self._times = times
        return self.rule.more(self.ratios(self._baseline))

    def ratios(self, other: str) -> list[float]:
        """Return the candidate's time / that of `other` in each opening so far."""
        ours, theirs = (
            [self._timer.milliseconds(round_) for round_ in self._times[name]]
            for name in (CANDIDATE, other)
        )
        return self._question.samples(ours, theirs)

    def ratio(self, other: str, confidence: float) -> dict[str, Any]:
        """Return {median, interval} of these ratios; `median` is their geometric mean."""
        ratios = self.ratios(other)
        interval = self._question.interval(ratios, confidence)
        return {"median": self._question.middle(ratios), "interval": list(interval)}

    def as_dict(self) -> dict[str, Any]:
        """Return fields of the report's timing: `median` as in `ratio`, and those of the stopping
        rule."""
        middle = self._question.middle(self.ratios(self._baseline))
        return {"median": middle, **self.rule.as_dict()}


def _times(timer: CellTimer, stopping: SequentialTest) -> MoreRounds:
    """Return the function (times so far) -> number of rounds to run next, by all times of the
    candidate."""
    return lambda times: stopping.more(timer.samples(times[CANDIDATE]))
