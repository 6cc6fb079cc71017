"""Layers like real ones: heavy-tailed weights, inputs that are correlated and have outliers."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.conftest import heavy_tailed


def rows(tokens: int, inputs: int, seed: int) -> Tensor:
    """(tokens, inputs): a few directions carry most of the energy, a few inputs are large."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=g) * torch.rand(inputs, generator=g) ** 3
    x = heavy_tailed((tokens, inputs), seed + 1, 1.0) @ mix / inputs**0.5
    x[:, :: inputs // 4] *= 10
    return x


def layer(seed: int = 1, out: int = 48, inputs: int = 128) -> tuple[Tensor, Tensor]:
    """A weight (out, inputs) and the mean of x^T x over its inputs."""
    x = rows(1500, inputs, seed)
    return heavy_tailed((out, inputs), seed + 2), x.T @ x / len(x)


def loss(weight: Tensor, values: Tensor, hessian: Tensor) -> float:
    """tr E H E^T of the error E (out, inputs): the squared output error over the tokens of H."""
    E = weight - values
    return float(((E @ hessian) * E).double().sum())
