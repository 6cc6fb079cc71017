"""Regression that several processes share: a new process imports this, and little else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from optimizer.foundation.process.launch import Processes
from optimizer.reduce.learn.training import Curve, train
from tests.reduce.learn.test_training import OPTIONS, Regression


class Shared(Regression):
    """The same data, of whose batches each process has a share."""

    def __init__(self, these: Processes) -> None:
        super().__init__()
        self.these = these

    def backward(self, step: int) -> float:
        rows = list(range(step * 16 % 300, step * 16 % 300 + 16))
        own = self.these.share(rows)
        loss = (self.x[own] @ self.weight - self.y[own]).abs().mean() * (len(own) / len(rows))
        loss.backward()
        return float(loss.detach())

    def train_shared(self, folder: Path) -> Curve:
        options = replace(OPTIONS, processes=2)
        return train(self.parameters, self.backward, self.held_out, options, folder, self.these)


class Forked(Shared):
    """And a bias that only the rows of the second process reach."""

    def __init__(self, these: Processes) -> None:
        super().__init__(these)
        self.bias = torch.nn.Parameter(torch.zeros(1))
        self.parameters = {**self.parameters, "bias": self.bias}

    def backward(self, step: int) -> float:
        loss = super().backward(step)
        if self.these.rank == 1:
            missed = (self.bias - 1).square().sum()
            missed.backward()
            loss += float(missed.detach())
        return loss


KINDS = (Shared, Forked)


def regress(these: Processes, folder: Path) -> None:
    """Train one of each kind, in a folder of its name: processes take seconds to start."""
    for kind in KINDS:
        kind(these).train_shared(folder / kind.__name__)
