"""Following a gradient: killed anywhere, it ends in the same weights; it never ends worse."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optimizer.foundation.errors import CheckpointError
from optimizer.reduce.learn.training import MEASURED, Curve, TrainingOptions, train

OPTIONS = TrainingOptions(steps=60, learning_rate=0.05, patience=MEASURED)


class Regression:
    """Least squares of correlated, heavy-tailed data, a batch per step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        mixing = torch.randn(6, 6)
        self.x = torch.distributions.StudentT(3.0).sample((400, 6)) @ mixing
        self.y = self.x @ torch.randn(6, 1) + 0.1 * torch.randn(400, 1)
        self.weight = nn.Parameter(torch.zeros(6, 1))
        self.parameters = {"weight": self.weight}

    def loss(self, rows: slice) -> Tensor:
        return (self.x[rows] @ self.weight - self.y[rows]).abs().mean()

    def backward(self, step: int) -> float:
        start = step * 16 % 300
        loss = self.loss(slice(start, start + 16))
        loss.backward()
        return float(loss.detach())

    def held_out(self) -> float:
        with torch.no_grad():
            return float(self.loss(slice(320, 400)))

    def train(self, folder: Path, options: TrainingOptions = OPTIONS) -> Curve:
        options = replace(options, keep_seconds=0)
        return train(self.parameters, self.backward, self.held_out, options, folder)


class Killed(BaseException):
    """Nothing that the code under test could catch by mistake."""


def killed_at(step: int, backward: Callable[[int], float]) -> Callable[[int], float]:
    def until(number: int) -> float:
        if number == step:
            raise Killed
        return backward(number)

    return until


def test_it_learns_and_holds_the_best_of_what_was_measured(tmp_path: Path) -> None:
    task = Regression()
    curve = task.train(tmp_path)
    assert len(curve.held_out) == MEASURED + 1
    assert curve.best[1] < curve.held_out[0][1] / 2
    assert task.held_out() == curve.best[1]


@pytest.mark.parametrize("step", [0, 1, 11, 37, 59])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, step: int) -> None:
    whole, task = Regression(), Regression()
    expected = whole.train(tmp_path / "whole")
    task.backward = killed_at(step, task.backward)  # type: ignore[method-assign]
    with pytest.raises(Killed):
        task.train(tmp_path / "killed")
    resumed = Regression()
    assert resumed.train(tmp_path / "killed") == expected
    assert torch.equal(resumed.weight, whole.weight)


def test_a_resumed_run_makes_no_step_again(tmp_path: Path) -> None:
    task = Regression()
    task.backward = killed_at(37, task.backward)  # type: ignore[method-assign]
    with pytest.raises(Killed):
        task.train(tmp_path)
    resumed = Regression()
    steps: list[int] = []
    backward = resumed.backward
    resumed.backward = lambda n: steps.append(n) or backward(n)  # type: ignore
    resumed.train(tmp_path)
    assert steps == list(range(37, 60))


def test_a_checkpoint_of_other_options_is_not_taken(tmp_path: Path) -> None:
    Regression().train(tmp_path)
    other = TrainingOptions(steps=40, learning_rate=0.01)
    fresh, after = Regression(), Regression()
    assert after.train(tmp_path, other) == fresh.train(tmp_path / "fresh", other)


def test_a_rate_that_only_harms_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    task = Regression()
    task.train(tmp_path)
    best = task.weight.detach().clone()
    curve = task.train(tmp_path / "again", TrainingOptions(steps=20, learning_rate=1.0))
    assert curve.best[0] == 0
    assert torch.equal(task.weight, best)


def test_it_stops_early_and_says_so(tmp_path: Path) -> None:
    task = Regression()
    task.train(tmp_path)
    options = TrainingOptions(steps=200, learning_rate=1.0, patience=3)
    curve = task.train(tmp_path / "again", options)
    best = [step for step, _ in curve.held_out].index(curve.best[0])
    assert len(curve.held_out) == best + 1 + 3
    assert f"no better held-out loss in 3 measurements after step {curve.best[0]}" == curve.stopped


def test_a_limit_of_time_takes_steps_away_and_is_recorded(tmp_path: Path) -> None:
    options = TrainingOptions(steps=100_000, learning_rate=0.05, patience=100_000, max_seconds=0.2)
    curve = Regression().train(tmp_path, options)
    assert 10 < curve.steps < 100_000
    assert curve.held_out[-1][0] == curve.steps


def test_a_rate_that_time_cut_short_has_fallen_all_the_same(tmp_path: Path) -> None:
    """The last step of few has as little of the rate as the last of many would have had."""
    weight = nn.Parameter(torch.zeros(1))
    seen: list[float] = []

    def backward(_step: int) -> float:
        time.sleep(0.01)
        seen.append(float(weight.detach()))
        weight.grad = torch.ones(1)
        return 0.0

    options = TrainingOptions(steps=5000, learning_rate=1.0, max_seconds=1.0, patience=100)
    curve = train({"w": weight}, backward, lambda: -float(weight.detach()), options, tmp_path)
    assert curve.steps < 5000
    steps = [b - a for a, b in pairwise(seen)]
    assert abs(steps[-1]) < max(map(abs, steps)) / 4


def test_a_machine_that_becomes_slower_ends_in_time_all_the_same(tmp_path: Path) -> None:
    task = Regression()
    backward = task.backward

    def slower(step: int) -> float:
        time.sleep(0.02 if step > 40 else 0)
        return backward(step)

    options = TrainingOptions(steps=400, learning_rate=0.05, max_seconds=2, patience=400)
    curve = train(task.parameters, slower, task.held_out, options, tmp_path)
    assert curve.steps < 400
    assert curve.held_out[-1][0] == curve.steps


def test_a_machine_that_becomes_faster_has_its_steps_back(tmp_path: Path) -> None:
    task = Regression()
    backward = task.backward

    def faster(step: int) -> float:
        time.sleep(0.1 if step < 15 else 0)
        return backward(step)

    options = TrainingOptions(steps=400, learning_rate=0.05, max_seconds=8, patience=400)
    curve = train(task.parameters, faster, task.held_out, options, tmp_path)
    assert curve.steps > 200  # 80, as the first ten steps have it
    assert curve.held_out[-1][0] == curve.steps


def test_a_student_that_agrees_stays_as_it_is(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(5, 5))
    before = weight.detach().clone()

    def backward(_step: int) -> float:
        loss = (weight - before).square().sum()
        loss.backward()
        return float(loss.detach())

    train({"w": weight}, backward, lambda: 0.0, OPTIONS, tmp_path)
    assert torch.equal(weight, before)


def test_a_loss_that_is_not_finite_is_refused_with_what_to_change(tmp_path: Path) -> None:
    weights, nan = Regression().parameters, float("nan")
    with pytest.raises(CheckpointError, match="lower learning_rate"):
        train(weights, lambda _: nan, lambda: 1.0, OPTIONS, tmp_path)
