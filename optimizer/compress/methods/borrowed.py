"""Weights and gains that a training loop may replace, and that are what they were afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def borrowed(linears: Mapping[str, nn.Linear], gains: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Inside, gains take gradients and weights may be exchanged; afterwards all is as it was."""
    weights, values = {n: m.weight for n, m in linears.items()}, copied(gains)
    took_gradients = {n: g.requires_grad for n, g in gains.items()}
    try:
        for gain in gains.values():
            gain.requires_grad_(True)
        yield
    finally:
        for name, linear in linears.items():
            linear.weight = weights[name]
        with torch.no_grad():
            for name, gain in gains.items():
                gain.copy_(values[name])
                gain.grad = None
                gain.requires_grad_(took_gradients[name])


def copied(gains: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gains' values at this moment."""
    return {name: gain.detach().clone() for name, gain in gains.items()}
