"""Coordinate descent on integers and scales."""

from __future__ import annotations

import pytest
import torch

from optimizer.compress.methods.weights.refine import refine
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.foundation.qtensor import QTensor, Scheme, to_scale_grid
from tests.compress.correlated import layer, loss

FULL = Scheme(4, True, "group", 32, full_range=True)


def test_a_wrong_scale_is_put_right() -> None:
    weight, hessian = layer(seed=3)
    right = rtn(weight, Scheme(4))
    wrong = QTensor(right.integers, to_scale_grid(right.scale * 1.06), None, right.scheme)
    found = refine(wrong, right.dequantize(), hessian, sweeps=1)
    assert not torch.equal(wrong.scale, right.scale)
    assert torch.equal(found.scale, right.scale)
    assert torch.equal(found.integers, right.integers)


def test_values_that_are_codes_already_stay() -> None:
    weight, hessian = layer(seed=4)
    for scheme in (Scheme(4, False, "group", 32), Scheme(4), Scheme(8, granularity="tensor"), FULL):
        q = rtn(weight, scheme)
        found = refine(q, q.dequantize(), hessian, sweeps=2)
        assert torch.equal(found.integers, q.integers)
        assert torch.equal(found.scale, q.scale)


@pytest.mark.parametrize("scheme", [Scheme(4, granularity="tensor"), FULL], ids=str)
def test_rounding_to_nearest_improves_on_the_output(scheme: Scheme) -> None:
    weight, hessian = layer(seed=5)
    q = rtn(weight, scheme)
    before = loss(weight, q.dequantize(), hessian)
    assert loss(weight, refine(q, weight, hessian, sweeps=2).dequantize(), hessian) < 0.8 * before
