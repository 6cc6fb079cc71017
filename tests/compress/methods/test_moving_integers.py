"""Integers that follow a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optimizer.compress.methods.moving_integers import MovingIntegers
from optimizer.compress.methods.rtn import rtn
from optimizer.qtensor import QTensor, Scheme
from tests.conftest import heavy_tailed

SCHEMES = [
    Scheme(4, granularity="group", group_size=16),
    Scheme(4, symmetric=False, granularity="group", group_size=16),
    Scheme(4, granularity="group", group_size=16, full_range=True),
    Scheme(8, granularity="channel"),
    Scheme(4, granularity="tensor"),
]
RATE, STEPS = 0.04, 40
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def start(scheme: Scheme) -> QTensor:
    """2 of 4 are zero."""
    weight = heavy_tailed((32, 64), seed=1)
    return rtn(weight * (torch.arange(64) % 4 < 2), scheme)


def followed(q: QTensor, slope: Tensor, pruned: bool = True, steps: int = STEPS) -> QTensor:
    moving = MovingIntegers(q, pruned, (0.9, 0.95), 1e-15)
    for _ in range(steps):
        moving.take_gradient(slope, q.scale)
        moving.step(RATE)
    return QTensor(moving.codes, q.scale, q.zero_point, q.scheme)


@every_scheme
def test_what_no_gradient_reaches_stays(scheme: Scheme) -> None:
    q = start(scheme)
    assert torch.equal(followed(q, torch.zeros(32, 64)).codes, q.codes)


@every_scheme
def test_a_pruned_weight_stays_zero_whatever_its_gradient_says(scheme: Scheme) -> None:
    q, slope = start(scheme), heavy_tailed((32, 64), seed=2)
    values = followed(q, slope).dequantize()
    assert not values[:, torch.arange(64) % 4 >= 2].any()
    assert (values != q.dequantize()).any()
    assert followed(q, slope, pruned=False).dequantize()[:, torch.arange(64) % 4 >= 2].any()


@every_scheme
def test_values_go_against_their_gradient(scheme: Scheme) -> None:
    q, slope = start(scheme), heavy_tailed((32, 64), seed=2)
    moved = followed(q, slope).dequantize() - q.dequantize()
    assert float((moved * slope).max()) <= 0
    assert float((moved * slope).min()) < 0


@every_scheme
def test_an_integer_moves_by_no_more_than_the_rates_together(scheme: Scheme) -> None:
    q = start(scheme)
    slope = torch.ones(32, 64)  # never turns: every step is as long as it can be
    for steps in (10, 13, 40):  # 0.4 of an integer, 0.52, 1.6
        moved = (followed(q, slope, steps=steps).codes - q.codes).abs()
        assert int(moved.max()) == round(RATE * steps)


@every_scheme
def test_no_integer_leaves_the_schemes(scheme: Scheme) -> None:
    for sign in (1, -1):
        codes = followed(start(scheme), sign * torch.ones(32, 64), steps=2000).codes
        assert int(codes.min()) >= scheme.low
        assert int(codes.max()) <= scheme.high
        assert scheme.low in codes or scheme.high in codes
