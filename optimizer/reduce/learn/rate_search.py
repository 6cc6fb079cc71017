"""The learning rate of a training that is given none: found by short trials on the data itself.

A trial is a training of a few steps, whose rate rises and falls as that of the whole will, and the
loss on held-out data is measured at its end. The first rate is the highest that makes sense: with
it, a parameter whose gradient never changes its sign moves by `reach` in a trial. For a weight that
is rounded `reach` is half a step of its integers: with a higher rate noise alone moves integers
(docs/decisions.md). Every further rate is a third of the one before, until one ends no lower.

In `folder`, while the training runs: rates.json holds every trial that ended, so that a run killed
at any moment finds the same rate.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from optimizer.foundation import atomic
from optimizer.foundation.progress import say
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.reduce.learn.processes import ALONE, Processes
from optimizer.reduce.learn.training import TrainingOptions, identity, share_of_rate, trial

FILE = "rates.json"
SHARE, FEWEST = 16, 8  # a trial has one step of so many, and at least so many
LOWER = 3  # times lower is the next rate: the loss is flat around the best one
TRIALS = 8  # the last is 2,187 times lower than the first: it moves nothing


@dataclass(frozen=True)
class RateSearch:
    """rate: of the trial that ended lowest. tried: [rate, loss] of each; seconds: of all."""

    rate: float
    tried: tuple[tuple[float, float], ...]
    seconds: float


def steps_of_trial(steps: int) -> int:
    """Of one for a training of so many."""
    return min(steps, max(FEWEST, steps // SHARE))


def search_rate(
    parameters: Mapping[str, nn.Parameter],
    backward: Callable[[int], float],
    held_out: Callable[[], float],
    options: TrainingOptions,
    folder: Path,
    processes: Processes = ALONE,
) -> RateSearch:
    """The rate for `training.train` of the same arguments, whose options' own rate is not read.
    The parameters are afterwards what they were. A trial whose loss or gradient is not finite lost
    everything."""
    reach = options.reach
    assert reach is not None
    steps = steps_of_trial(options.steps)
    path = sum(share_of_rate(i + 1, steps, options.warmup) for i in range(steps))
    options = replace(options, steps=steps, max_seconds=None)
    tried, seconds = _kept(folder, options, processes)
    while not _decided(tried):
        rate = reach / path / LOWER ** len(tried)
        before = time.monotonic()
        one = replace(options, learning_rate=rate)
        tried.append((rate, trial(parameters, backward, held_out, one, processes)))
        seconds += time.monotonic() - before
        if processes.first:
            _keep(folder, options, tried, seconds)
        loss = tried[-1][1]
        say(f"{options.step}: {steps} steps at a rate of {rate:.2g} end at a loss of {loss:.4g}")
    best = min(tried, key=lambda trial: trial[1])[0]
    say(f"{options.step}: learning_rate {best:.2g}")
    return RateSearch(best, tuple(tried), seconds)


def options_after(
    search: RateSearch, options: TrainingOptions, processes: Processes = ALONE
) -> TrainingOptions:
    """With the rate that was found, in the time that the trials left: a second at least."""
    left = options.max_seconds
    if left is not None:
        (left,) = processes.of_first([max(left - search.seconds, 1.0)])
    return replace(options, learning_rate=search.rate, max_seconds=left)


def _decided(tried: list[tuple[float, float]]) -> bool:
    """Whether no further trial is needed: the last ended no lower than the one before."""
    if len(tried) == TRIALS:
        return True
    return len(tried) > 1 and math.isfinite(tried[-2][1]) and tried[-1][1] >= tried[-2][1]


def _document(options: TrainingOptions) -> dict[str, Any]:
    """What the trials follow from; their own rates follow from it too."""
    return identity(replace(options, learning_rate=0.0))


def _keep(
    folder: Path,
    options: TrainingOptions,
    tried: list[tuple[float, float]],
    seconds: float,
) -> None:
    document = {"options": _document(options), "tried": tried, "seconds": seconds}
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write(folder / FILE, json.dumps(document).encode())


def _kept(
    folder: Path, options: TrainingOptions, processes: Processes
) -> tuple[list[tuple[float, float]], float]:
    """The trials of a run before this one, and their seconds. All processes read the same: none
    writes before each of them did."""
    file = folder / FILE
    document = read_json(file) if file.is_file() else {}
    processes.sums([0.0])
    if document.get("options") != json.loads(json.dumps(_document(options))):
        return [], 0.0
    return [(rate, loss) for rate, loss in document["tried"]], float(document["seconds"])
