"""AWQ moves error, never the function, and never for the worse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optimizer.compress.methods.activations import awq
from optimizer.compress.methods.activations.shared_heads import SharedHeads
from optimizer.compress.methods.activations.smoothquant import fold_consumer, fold_producer
from optimizer.compress.methods.weights.rtn import search_scales
from optimizer.foundation.qtensor import Scheme
from tests.compress.correlated import loss, rows
from tests.conftest import heavy_tailed


def code(weight: Tensor, importance: Tensor | None = None) -> Tensor:
    return search_scales(weight, Scheme(4, True, "group", 32), importance).dequantize()


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.T @ x, x.abs().mean(0)


def test_scaling_where_activations_are_large_lowers_the_output_error() -> None:
    x, weight = rows(1500, 128, 1), heavy_tailed((48, 128), 2)
    hessian, mean = statistics(x)
    found = awq.search([weight], hessian, mean, code)
    assert found.alpha is not None
    values = code(weight * found.s, hessian.diagonal() / found.s**2) / found.s
    assert loss(weight, values, hessian) == pytest.approx(found.error)
    assert found.error < 0.9 * found.unscaled


@pytest.mark.parametrize("seed", range(4))
def test_awq_is_never_worse_than_not_scaling(seed: int) -> None:
    x = heavy_tailed((300, 64), seed, 1.0)
    hessian, mean = statistics(x)
    found = awq.search([heavy_tailed((8, 64), seed + 9)], hessian, mean, code, alphas=(0.2, 0.9))
    assert found.error <= found.unscaled


def test_exact_codes_leave_everything_alone() -> None:
    hessian, mean = statistics(rows(100, 64, 3))
    found = awq.search([heavy_tailed((8, 64), 4)], hessian, mean, lambda w, _: w)
    assert found.alpha is None
    assert torch.equal(found.s, torch.ones(64))


def test_consumers_of_one_input_get_one_scaling_that_suits_both() -> None:
    x = rows(800, 64, 5)
    hessian, mean = statistics(x)
    weights = [heavy_tailed((16, 64), 6), heavy_tailed((24, 64), 7)]
    found = awq.search(weights, hessian, mean, code)
    errors = [
        loss(w, code(w * found.s, hessian.diagonal() / found.s**2) / found.s, hessian)
        for w in weights
    ]
    assert sum(errors) == pytest.approx(found.error, rel=1e-5)


def test_folding_through_shared_value_heads_keeps_the_function() -> None:
    shared = SharedHeads(repeats=3, size=16)
    value, output = heavy_tailed((32, 24), 1), heavy_tailed((20, 96), 2)
    x = rows(200, 24, 3)

    def attended(v: Tensor) -> Tensor:
        heads = (x @ v.T).reshape(200, 2, 1, 16).expand(-1, -1, 3, -1)
        return heads.reshape(200, 96)

    hessian, mean = statistics(attended(value))
    s = awq.search([output], hessian, mean, code, shared=shared).s
    assert not torch.equal(s, torch.ones(96))
    before = attended(value) @ output.T
    folded = attended(fold_producer(value, shared.of_producer(s)))
    after = folded @ fold_consumer(output, s).T
    assert torch.allclose(before, after, rtol=1e-3, atol=1e-5 * float(before.abs().max()))


def test_an_input_that_carries_nothing_is_left_alone() -> None:
    s = awq.compute_factors(torch.tensor([0.0, 4.0, 1.0]), torch.ones(3), 0.5)
    assert float(s[0]) == 1.0
    assert float(s[1] / s[2]) == pytest.approx(2.0)


def test_nan_is_refused_by_name() -> None:
    hessian, mean = statistics(rows(50, 32, 1))
    mean[2] = float("nan")
    with pytest.raises(ValueError, match="activation"):
        awq.search([heavy_tailed((4, 32), 2)], hessian, mean, code)
