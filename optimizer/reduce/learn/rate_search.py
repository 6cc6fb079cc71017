"""Search the learning rate by short trials on the data itself, where the recipe sets none.

A trial is a training of a few steps with the schedule of the full one, and its result is the loss
on held-out data at its end. With the first rate a parameter whose gradient keeps its sign moves by
`reach` in a trial. For a quantized weight `reach` is half a step of its integers: with a higher
rate noise alone moves integers (docs/decisions/0033). Every further rate is a third of the one
before, until a trial ends with a loss that is not lower.

While the training runs, `folder`/rates.json holds every finished trial, so a killed run finds the
same rate.
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
from optimizer.foundation.process.launch import ALONE, Processes
from optimizer.foundation.progress import say
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.reduce.learn.training import TrainingOptions, identify, run_trial, share_of_rate

FILE = "rates.json"
SHARE, FEWEST = 16, 8  # a trial has 1 / SHARE of the steps, at least FEWEST
LOWER = 3  # factor between rates: the loss is flat around the best one
TRIALS = 8  # at most; the last rate is 2,187 times lower than the first


@dataclass(frozen=True)
class RateSearch:
    """Result of a search for a learning rate.

    rate: rate of the trial with the lowest loss
    tried: (rate, loss) of each trial
    seconds: duration of all trials
    """

    rate: float
    tried: tuple[tuple[float, float], ...]
    seconds: float


def count_trial_steps(steps: int) -> int:
    """Return the number of steps of a trial.

    steps: number of steps of the training
    """
    return min(steps, max(FEWEST, steps // SHARE))


def search_rate(
    parameters: Mapping[str, nn.Parameter],
    backward: Callable[[int], float],
    held_out: Callable[[], float],
    options: TrainingOptions,
    folder: Path,
    processes: Processes = ALONE,
) -> RateSearch:
    """Search the learning rate for `training.train` with the same arguments, whose
    options.learning_rate is ignored. Afterwards the parameters have their values from before. A
    trial whose loss or gradient is not finite counts as an infinite loss."""
    reach = options.reach
    assert reach is not None
    steps = count_trial_steps(options.steps)
    path = sum(share_of_rate(i + 1, steps, options.warmup) for i in range(steps))
    options = replace(options, steps=steps, max_seconds=None)
    tried, seconds = _load(folder, options, processes)
    while not _decided(tried):
        rate = reach / path / LOWER ** len(tried)
        before = time.monotonic()
        one = replace(options, learning_rate=rate)
        tried.append((rate, run_trial(parameters, backward, held_out, one, processes)))
        seconds += time.monotonic() - before
        if processes.first:
            _save(folder, options, tried, seconds)
        loss = tried[-1][1]
        say(f"{options.step}: {steps} steps at a rate of {rate:.2g} end with a loss of {loss:.4g}")
    best = min(tried, key=lambda trial: trial[1])[0]
    say(f"{options.step}: learning_rate {best:.2g}")
    return RateSearch(best, tuple(tried), seconds)


def derive_options(
    search: RateSearch, options: TrainingOptions, processes: Processes = ALONE
) -> TrainingOptions:
    """Return `options` with the rate that was found, and with the time limit reduced by the seconds
    of the trials (at least one second is left)."""
    left = options.max_seconds
    if left is not None:
        (left,) = processes.of_first([max(left - search.seconds, 1.0)])
    return replace(options, learning_rate=search.rate, max_seconds=left)


def _decided(tried: list[tuple[float, float]]) -> bool:
    """Return True where the search for a learning rate needs no further trial: the last loss did
    not fall, or TRIALS trials are done."""
    if len(tried) == TRIALS:
        return True
    return len(tried) > 1 and math.isfinite(tried[-2][1]) and tried[-1][1] >= tried[-2][1]


def _document(options: TrainingOptions) -> dict[str, Any]:
    """Return {option: value} of the options of a training on which the trials and their rates
    depend."""
    return identify(replace(options, learning_rate=0.0))


def _save(
    folder: Path,
    options: TrainingOptions,
    tried: list[tuple[float, float]],
    seconds: float,
) -> None:
    document = {"options": _document(options), "tried": tried, "seconds": seconds}
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write(folder / FILE, json.dumps(document).encode())


def _load(
    folder: Path, options: TrainingOptions, processes: Processes
) -> tuple[list[tuple[float, float]], float]:
    """Read the trials of learning rates of an earlier run: (trials, their seconds in total). All
    processes read the same file, because none writes before all have read it."""
    file = folder / FILE
    document = read_json(file) if file.is_file() else {}
    processes.sums([0.0])
    if document.get("options") != json.loads(json.dumps(_document(options))):
        return [], 0.0
    return [(rate, loss) for rate, loss in document["tried"]], float(document["seconds"])
