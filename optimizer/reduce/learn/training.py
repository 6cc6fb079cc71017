"""Train parameters by the gradient of a loss, so that a killed run resumes bit-identically.

AdamW without weight decay (Loshchilov and Hutter 2019); the rate rises over the warm-up and then
falls to 0 along a cosine. The loss on held-out data is measured before the first step and MEASURED
times after it; the weights with the lowest loss are the result, so the held-out loss never ends
above its start.

In `folder`, while it runs:
    checkpoint/state.json           finished steps, all steps, the curve
    checkpoint/tensors.safetensors  parameter/<name>, first/<name>, second/<name> (Adam's moments),
                                    best/<name>
The batch of a step depends on its number alone, so nothing else is needed to resume.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.foundation import safetensors_stream
from optimizer.foundation.atomic import remove, replace, restore
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process.launch import ALONE, Processes
from optimizer.foundation.progress import meter, say

MEASURED = 20  # measurements on held-out data: enough to stop early, a few percent of the time
TIMED = 10  # steps before max_seconds limits their number; the first ones are slower
BETAS, EPSILON = (0.9, 0.98), 1e-8
LONGEST_GRADIENT = 2.0  # gradients are clipped at this multiple of their mean length so far


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a training (recovery or qat), mostly as in recipe/recover.py.

    max_seconds: time limit; None: no limit
    rates: {parameter: its own learning rate}
    shares: {parameter: factor of learning_rate}
    where: place of the options in the recipe
    keep_seconds: seconds between checkpoints
    processes: number of processes that train together
    reach: distance that a parameter may move in a trial, for a learning_rate that is searched
        (rate_search.py)
    """

    steps: int
    learning_rate: float
    warmup: float = 0.05
    patience: int = 8
    max_seconds: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    where: str = "training"
    keep_seconds: float = 60.0
    processes: int = 1
    reach: float | None = None

    @property
    def step(self) -> str:
        """Name of the training (recover, qat) in progress lines."""
        return self.where.rpartition(".")[2]

    def rate(self, parameter: str) -> float:
        """Return the highest learning rate of a trained parameter over the schedule."""
        share = self.shares.get(parameter, 1.0)
        return self.rates.get(parameter, self.learning_rate * share)


@dataclass
class Curve:
    """Losses over the steps of a training.

    steps: planned number of steps
    held_out: (step, loss) of each measurement
    train: (step, mean loss since the measurement before)
    stopped: reason for stopping early, or ""
    """

    steps: int
    held_out: list[tuple[int, float]] = field(default_factory=list)
    train: list[tuple[int, float]] = field(default_factory=list)
    stopped: str = ""

    @property
    def best(self) -> tuple[int, float]:
        """(step, held-out loss) of the measurement with the lowest loss."""
        return min(self.held_out, key=lambda point: (point[1], point[0]))

    @property
    def since_best(self) -> int:
        """Number of measurements of the held-out loss after the best one, for early stopping."""
        return sum(step > self.best[0] for step, _ in self.held_out)


def train(
    parameters: Mapping[str, nn.Parameter],
    backward: Callable[[int], float],
    held_out: Callable[[], float],
    options: TrainingOptions,
    folder: Path,
    processes: Processes = ALONE,
) -> Curve:
    """Train `parameters` of a student or a compressed model, which have the best values afterwards.
    Raises CheckpointError for a loss or gradient that is not finite.

    Several processes that call this together leave a checkpoint of the end, from which the same
    call of a process alone restores the values.

    backward: function of a step that adds the gradient of its loss to the parameters' gradients and
        returns the loss; several processes return the losses of their shares, which are summed
    held_out: function that returns the loss on held-out data, the same in all processes
    folder: folder for checkpoints; empty, or with those of the same call
    processes: this process among the options.processes that train together
    """
    run = _Run(parameters, options, folder, processes)
    if not run.restored():
        run.measure(held_out)
    saved = time.monotonic()
    with meter(options.step, run.curve.steps, run.done) as tell:
        while run.done < run.curve.steps and not run.curve.stopped:
            run.step(backward)
            if run.at_measurement():
                run.measure(held_out)
                run.stop_early()
                run.fit_time(at_least=run.done)
            elif run.done == TIMED:
                run.fit_time(at_least=run.done + 1)
            if time.monotonic() - saved >= options.keep_seconds:
                run.save()
                saved = time.monotonic()
            tell(min(run.done, run.curve.steps), run.curve.steps)
    if processes.count > 1:
        run.save()
    run.place_best()
    return run.curve


def run_trial(
    parameters: Mapping[str, nn.Parameter],
    backward: Callable[[int], float],
    held_out: Callable[[], float],
    options: TrainingOptions,
    processes: Processes = ALONE,
) -> float:
    """Run all steps of a training and return the held-out loss at the end; infinity where a loss or
    gradient is not finite. The parameters get their values back, and no checkpoint is written."""
    run = _Run(parameters, options, Path(), processes)
    try:
        while run.done < options.steps:
            run.step(backward)
        loss = held_out()
    except CheckpointError:
        loss = math.inf
    run.place_best()  # without a measurement these are the values before the first step
    for p in parameters.values():
        p.grad = None
    return loss if math.isfinite(loss) else math.inf


def share_of_rate(step: int, steps: int, warmup: float) -> float:
    """Return the learning rate at `step`, counted from 1, as a fraction of the highest rate."""
    rising = max(1, round(warmup * steps))
    if step <= rising:
        return step / rising
    share = (step - rising) / max(1, steps - rising)
    return (1 + math.cos(math.pi * min(1.0, share))) / 2


class _Run:
    """A training in progress: weights, Adam's state, losses and the reason to stop."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: TrainingOptions,
        folder: Path,
        processes: Processes,
    ) -> None:
        self.parameters, self.options, self.folder = parameters, options, folder
        self.processes = processes
        self.curve, self.done = Curve(options.steps), 0
        self.losses, self.lengths = 0.0, 0.0  # sums since the last measurement, over all steps
        self.first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.best = {name: p.detach().clone() for name, p in parameters.items()}
        self.spent, self.measuring = 0.0, 0.0  # seconds in total, and of one measurement
        self.lately: list[float] = []  # seconds of the steps since the last call of fit_time

    def step(self, backward: Callable[[int], float]) -> None:
        """Take one training step: compute gradients, sum them over all processes, limit the norm of
        the sum, and update the parameters.

        backward: function from a step's number to its loss, which adds to the gradients (`train`)
        """
        started = time.monotonic()
        (loss,) = self.processes.sums([backward(self.done)])
        if self.processes.count > 1:  # all processes must sum the same tensors
            for p in self.parameters.values():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        self.processes.add(gradients.values())
        length = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        if not (math.isfinite(loss) and math.isfinite(length)):
            raise CheckpointError(
                f"the loss of step {self.done} is {loss} and its gradient's length {length}",
                where=self.options.where,
                accepted="finite numbers",
                fix=f"Try a lower learning_rate than {self.options.learning_rate:g}.",
            )
        self.done += 1
        self.lengths += length
        longest = LONGEST_GRADIENT * self.lengths / self.done
        for name, gradient in gradients.items():
            self._update(name, gradient.mul_(longest / length if length > longest else 1.0))
            self.parameters[name].grad = None
        self.losses += loss
        self.lately.append(time.monotonic() - started)
        self.spent += self.lately[-1]

    @torch.no_grad()
    def _update(self, name: str, gradient: Tensor) -> None:
        """Update one trained parameter by Adam (Kingma and Ba 2015, algorithm 1)."""
        m, v = self.first[name], self.second[name]
        m.lerp_(gradient, 1 - BETAS[0])
        v.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        corrected = [1 - beta**self.done for beta in BETAS]
        denominator = (v / corrected[1]).sqrt_().add_(EPSILON)
        share = share_of_rate(self.done, self.curve.steps, self.options.warmup)
        rate = self.options.rate(name) * share
        self.parameters[name].addcdiv_(m, denominator, value=-rate / corrected[0])

    def at_measurement(self) -> bool:
        """Return True where the held-out loss is due after the step just taken."""
        total = self.curve.steps
        before, now = (MEASURED * n // total for n in (self.done - 1, self.done))
        return now > before

    def measure(self, held_out: Callable[[], float]) -> None:
        """Measure the held-out loss, record it with the mean training loss, and keep the weights if
        it is the lowest so far."""
        started = time.monotonic()
        loss = held_out()
        self.measuring = time.monotonic() - started
        self.spent += self.measuring
        if not math.isfinite(loss):
            raise CheckpointError(
                f"the loss on held-out data is {loss} after step {self.done}",
                where=self.options.where,
                accepted="a finite number",
                fix=f"Try a lower learning_rate than {self.options.learning_rate:g}.",
            )
        if self.done:
            since = self.done - self.curve.held_out[-1][0]
            self.curve.train.append((self.done, self.losses / since))
        self.curve.held_out.append((self.done, loss))
        self.losses = 0.0
        if self.curve.best[0] == self.done:
            for name, p in self.parameters.items():
                self.best[name].copy_(p.detach())

    def stop_early(self) -> None:
        """Record the reason for stopping if the held-out loss has not fallen for options.patience
        measurements."""
        if self.curve.since_best >= self.options.patience:
            self.curve.stopped = (
                f"no better held-out loss in {self.options.patience} measurements after step "
                f"{self.curve.best[0]}"
            )

    def fit_time(self, at_least: int) -> None:
        """Change the number of steps to fit the time limit, from the durations of the last steps.

        The speed of a machine may change, and few steps measure it roughly, so the number at most
        doubles at a time. The learning rate falls to 0 by the new last step.
        """
        limit, steps = self.options.max_seconds, self.curve.steps
        each = sum(self.lately) / max(1, len(self.lately))
        self.lately = []
        each, spent, measuring = self.processes.of_first([each, self.spent, self.measuring])
        if limit is None or not each or self.done == steps:
            return
        judging = measuring * MEASURED * (1 - self.done / steps)
        possible = max(at_least, self.done + int((limit - spent - judging) / each))
        possible = min(possible, 2 * steps, self.options.steps)
        if possible != steps:
            self.curve.steps = possible
            self.save()
            say(
                f"{self.options.step}: {each:.2f} s per step, so max_hours allows {possible} of "
                f"{self.options.steps} steps"
            )

    def place_best(self) -> None:
        """Copy the best weights of the training into the parameters."""
        for name, p in self.parameters.items():
            p.data.copy_(self.best[name])

    def save(self) -> None:
        """Write a checkpoint from which a killed training is resumed; only the first process
        does."""
        if not self.processes.first:
            return
        partial, final = self.folder / "checkpoint.partial", self.folder / "checkpoint"
        remove(partial)
        partial.mkdir(parents=True)
        safetensors_stream.write(self._entries(), partial / "tensors.safetensors")
        state = {
            "done": self.done,
            "losses": self.losses,
            "lengths": self.lengths,
            "spent": self.spent,
            "options": identify(self.options),
            "curve": asdict(self.curve),
        }
        (partial / "state.json").write_text(json.dumps(state), encoding="utf-8")
        replace(partial, final)
        remove(partial)

    def _entries(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.parameters.items():
            yield f"parameter/{name}", p.detach().cpu()
            yield f"first/{name}", self.first[name].cpu()
            yield f"second/{name}", self.second[name].cpu()
            yield f"best/{name}", self.best[name].cpu()

    def restored(self) -> bool:
        """Restore the training's checkpoint of an earlier run; return False without one."""
        from safetensors import safe_open

        folder = self.folder / "checkpoint"
        if self.processes.first:
            restore(folder)
        self.processes.sums([0.0])  # a barrier: no process reads before this is done
        state: dict[str, Any] = {}
        if folder.is_dir():
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        self.processes.sums([0.0])  # a barrier: all have read it, or found none
        if not state:
            return False
        if state["options"] != identify(self.options):
            if self.processes.first:
                remove(folder)
            return False
        self.done, self.losses, self.lengths = state["done"], state["losses"], state["lengths"]
        self.spent = state["spent"]
        curve = state["curve"]
        for points in ("held_out", "train"):
            curve[points] = [tuple(point) for point in curve[points]]
        self.curve = Curve(**curve)
        with safe_open(folder / "tensors.safetensors", "pt") as f:
            for name, p in self.parameters.items():
                p.data.copy_(f.get_tensor(f"parameter/{name}"))
                self.first[name].copy_(f.get_tensor(f"first/{name}"))
                self.second[name].copy_(f.get_tensor(f"second/{name}"))
                self.best[name].copy_(f.get_tensor(f"best/{name}"))
        self.processes.sums([0.0])  # a barrier: the first must not replace files being read
        say(f"{self.options.step}: resuming after {self.done} of {self.curve.steps} steps")
        return True


def identify(options: TrainingOptions) -> dict[str, Any]:
    """Return {option: value} of the training options that change the weights: all but
    keep_seconds."""
    return {k: v for k, v in asdict(options).items() if k != "keep_seconds"}
