"""Smoothing moves error and changes nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from optimizer.compress.methods.activations import smoothquant
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.compress.simulate import fake_quantize
from optimizer.foundation.qtensor import Scheme
from optimizer.foundation.state import Range
from tests.conftest import heavy_tailed


def code_activation(x: Tensor) -> Tensor:
    return fake_quantize(x, Range.symmetric(float(x.abs().max())))


def code_weight(w: Tensor) -> Tensor:
    return rtn(w, Scheme(8)).dequantize()


def test_folding_leaves_the_function_as_it_was() -> None:
    x, w1, b1 = heavy_tailed((50, 32), 1), heavy_tailed((64, 32), 2), heavy_tailed((64,), 3)
    w2 = heavy_tailed((16, 64), 4)
    s = smoothquant.compute_factors((x @ w1.T + b1).abs().amax(0), w2.abs().amax(0), 0.5)
    folded = x @ smoothquant.fold_producer(w1, s).T + smoothquant.fold_producer(b1, s)
    before, after = (x @ w1.T + b1) @ w2.T, folded @ smoothquant.fold_consumer(w2, s).T
    assert torch.allclose(before, after, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(folded, x @ w1.T + b1, rtol=1e-2)  # something was moved


def test_folding_a_part_leaves_the_other_rows_untouched() -> None:
    fused, s = heavy_tailed((12, 8), 5), torch.tensor([2.0, 4.0, 8.0, 16.0])
    folded = smoothquant.fold_producer(fused, s, slice(8, 12))
    assert torch.equal(folded[:8], fused[:8])
    assert torch.equal(folded[8:] * s[:, None], fused[8:])


def test_strength_one_levels_the_activation_and_zero_the_weight() -> None:
    a, w = torch.tensor([1.0, 10.0, 100.0]), torch.tensor([3.0, 1.0, 2.0])
    levelled = a / smoothquant.compute_factors(a, w, 1.0)
    assert torch.allclose(levelled, levelled[:1].expand(3))
    levelled = w * smoothquant.compute_factors(a, w, 0.0)
    assert torch.allclose(levelled, levelled[:1].expand(3))


def test_an_empty_channel_is_left_alone() -> None:
    s = smoothquant.compute_factors(
        torch.tensor([0.0, 4.0, 1.0]), torch.tensor([1.0, 1.0, 0.0]), 0.5
    )
    assert torch.equal(s, torch.ones(3))


def test_the_search_finds_smoothing_where_channels_are_outliers() -> None:
    x, w = heavy_tailed((400, 64), 6), heavy_tailed((32, 64), 7)
    x[:, :3] *= 60
    strength, s = smoothquant.search(x, x.abs().amax(0), [w], code_activation, code_weight)

    def error(s: Tensor) -> float:
        y = code_activation(x / s) @ code_weight(w * s).T
        return float((y - x @ w.T).square().sum())

    assert strength is not None
    assert error(s) < 0.2 * error(torch.ones(64))


def test_the_search_keeps_hands_off_when_smoothing_cannot_help() -> None:
    x, w = heavy_tailed((100, 16), 8), heavy_tailed((8, 16), 9)
    exact = smoothquant.search(x, x.abs().amax(0), [w], lambda t: t, lambda t: t, (0.5,))
    # without any coding every strength has an error of rounding only; 1 / s * s loses, ones do not
    assert exact[0] is None
    assert torch.equal(exact[1], torch.ones(16))
