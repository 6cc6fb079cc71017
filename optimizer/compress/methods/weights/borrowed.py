"""Weights of modules and of norms that a training loop may replace; afterwards they are what they
were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def borrowed(
    modules: Mapping[str, nn.Linear] | Mapping[str, nn.Linear | nn.Conv2d],
    norm_weights: Mapping[str, nn.Parameter],
) -> Iterator[None]:
    """Inside, norm weights take gradients and the modules' may be exchanged; afterwards all is as
    it was."""
    weights, values = {n: m.weight for n, m in modules.items()}, copied(norm_weights)
    took_gradients = {n: g.requires_grad for n, g in norm_weights.items()}
    try:
        for gain in norm_weights.values():
            gain.requires_grad_(True)
        yield
    finally:
        for name, module in modules.items():
            module.weight = weights[name]
        with torch.no_grad():
            for name, gain in norm_weights.items():
                gain.copy_(values[name])
                gain.grad = None
                gain.requires_grad_(took_gradients[name])


def copied(norm_weights: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The norm weights' values at this moment."""
    return {name: gain.detach().clone() for name, gain in norm_weights.items()}
