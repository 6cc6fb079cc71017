"""Scales chosen by importance and by output error."""

from __future__ import annotations

import pytest
import torch

from optimizer.compress.methods.weights.rtn import rtn, search_scales
from optimizer.compress.methods.weights.scale_search import search_output_scales
from optimizer.foundation.qtensor import Scheme
from tests.compress.correlated import layer, loss

SCHEMES = [
    Scheme(4, True, "group", 32),
    Scheme(3, False, "group", 32),
    Scheme(4, True, "group", 32, full_range=True),
    Scheme(4),
    Scheme(4, granularity="tensor"),
    Scheme(4, False, "tensor"),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_searching_by_output_is_never_worse_than_by_importance(scheme: Scheme) -> None:
    weight, hessian = layer(seed=2)
    weighted = search_scales(weight, scheme, hessian.diagonal())
    found = search_output_scales(weight, hessian, scheme)
    assert found.scheme == scheme
    before, after = (loss(weight, q.dequantize(), hessian) for q in (weighted, found))
    assert after <= before
    assert after < before or scheme.granularity == "tensor"  # one scale of one grid may be the same


def test_importance_pays_where_it_lies() -> None:
    weight, hessian = layer(seed=3)
    scheme, importance = Scheme(3), hessian.diagonal()

    def error(values: torch.Tensor) -> float:
        return float(((weight - values).square() * importance).sum())

    assert error(search_scales(weight, scheme, importance).dequantize()) < error(
        rtn(weight, scheme).dequantize()
    )


def test_equal_importance_is_none() -> None:
    weight, _ = layer()
    one = search_scales(weight, Scheme(4), torch.ones(128))
    assert torch.equal(one.integers, search_scales(weight, Scheme(4)).integers)


def test_nan_is_refused() -> None:
    weight, hessian = layer()
    hessian[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        search_output_scales(weight, hessian, Scheme(4))
