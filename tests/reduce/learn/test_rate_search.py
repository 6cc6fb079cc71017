"""A learning rate is found by trials that change nothing, the same after every kill."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from optimizer.reduce.learn.rate_search import (
    LOWER,
    TRIALS,
    RateSearch,
    count_trial_steps,
    search_rate,
)
from optimizer.reduce.learn.training import TrainingOptions, share_of_rate, train
from tests.reduce.learn.test_training import Killed, Regression

OPTIONS = TrainingOptions(steps=160, learning_rate=0.0)
REACH = 1000.0  # far beyond every good answer


class Counting(Regression):
    """Dies at the step that is the `until`-th to be made."""

    def __init__(self, until: float = math.inf) -> None:
        super().__init__()
        self.made, self.until = 0, until

    def backward(self, step: int) -> float:
        if self.made == self.until:
            raise Killed
        self.made += 1
        return super().backward(step)


def search(task: Regression, folder: Path, reach: float = REACH) -> RateSearch:
    options = replace(OPTIONS, reach=reach)
    return search_rate(task.parameters, task.backward, task.held_out, options, folder)


def test_with_the_first_rate_a_constant_gradient_reaches_just_so_far(tmp_path: Path) -> None:
    steps = count_trial_steps(OPTIONS.steps)
    first = search(Regression(), tmp_path).tried[0][0]
    shares = [share_of_rate(i + 1, steps, OPTIONS.warmup) for i in range(steps)]
    assert first * sum(shares) == pytest.approx(REACH)


def test_every_rate_is_a_third_of_the_one_before_until_one_ends_no_lower(tmp_path: Path) -> None:
    tried = search(Regression(), tmp_path).tried
    rates, losses = zip(*tried, strict=True)
    assert all(b == pytest.approx(a / LOWER) for a, b in pairwise(rates))
    assert all(b < a for a, b in pairwise(losses[:-1]))
    assert losses[-1] >= losses[-2] or len(tried) == TRIALS


def test_what_is_found_learns_where_the_highest_would_only_harm(tmp_path: Path) -> None:
    task = Regression()
    task.train(tmp_path / "before")
    start = task.held_out()
    rate = search(task, tmp_path).rate
    high = TrainingOptions(steps=16, learning_rate=search(task, tmp_path).tried[0][0])
    harmed = Regression()
    harmed.weight.data.copy_(task.weight.data)
    assert harmed.train(tmp_path / "high", high).best[0] == 0
    assert task.train(tmp_path / "low", replace(high, learning_rate=rate)).best[1] <= start


def test_the_parameters_are_what_they_were(tmp_path: Path) -> None:
    task = Regression()
    task.weight.data.normal_()
    before = task.weight.detach().clone()
    search(task, tmp_path)
    assert torch.equal(task.weight, before)
    assert task.weight.grad is None


def test_a_trial_that_is_not_finite_loses_to_every_other(tmp_path: Path) -> None:
    task = Regression()
    held_out = task.held_out
    first: list[float] = []

    def judged() -> float:
        first.append(held_out())
        return math.nan if len(first) == 1 else first[-1]

    task.held_out = judged  # type: ignore[method-assign]
    chosen = search(task, tmp_path, reach=0.1)
    assert chosen.tried[0][1] == math.inf
    assert chosen.rate < chosen.tried[0][0]


@pytest.mark.parametrize("trial", [0, 1, 3])
def test_a_killed_search_finds_the_same_and_tries_none_again(tmp_path: Path, trial: int) -> None:
    expected = search(Regression(), tmp_path / "whole").tried
    steps = count_trial_steps(OPTIONS.steps)
    with pytest.raises(Killed):
        search(Counting(until=trial * steps + 2), tmp_path)
    resumed = Counting()
    assert search(resumed, tmp_path).tried == expected
    assert resumed.made == (len(expected) - trial) * steps


def test_trials_of_another_reach_are_not_taken(tmp_path: Path) -> None:
    search(Regression(), tmp_path)
    other = search(Regression(), tmp_path, reach=1.0)
    assert other == replace(search(Regression(), tmp_path / "fresh", 1.0), seconds=other.seconds)


def test_a_share_of_the_rate_rises_and_falls_with_it(tmp_path: Path) -> None:
    """Half of the rate for a parameter is what half of the rate for all would be."""
    ends = []
    for options in (
        TrainingOptions(steps=20, learning_rate=0.02),
        TrainingOptions(steps=20, learning_rate=0.04, shares={"weight": 0.5}),
    ):
        task = Regression()
        train(task.parameters, task.backward, task.held_out, options, tmp_path / str(len(ends)))
        ends.append(task.weight.detach().clone())
    assert torch.equal(*ends)
