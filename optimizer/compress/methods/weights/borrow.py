"""Lend the weights of modules and norms to a training loop, and restore them afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def borrow_weights(
    modules: Mapping[str, nn.Linear] | Mapping[str, nn.Linear | nn.Conv2d],
    norm_weights: Mapping[str, nn.Parameter],
) -> Iterator[None]:
    """Inside, rounding or scales are learned: norm weights take gradients and modules' weights may
    be replaced; both are restored afterwards."""
    weights, values = {n: m.weight for n, m in modules.items()}, copy_norm_weights(norm_weights)
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


def copy_norm_weights(norm_weights: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copy the norm weights' present values, which a tuning method may change."""
    return {name: gain.detach().clone() for name, gain in norm_weights.items()}
