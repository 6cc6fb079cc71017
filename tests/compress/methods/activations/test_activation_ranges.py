"""Histograms are exact functions of the values; ranges obey the definition of their method."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optimizer.compress.methods.activations.activation_ranges import (
    BINS,
    Channels,
    MagnitudeHistogram,
    compute_excess_loss,
    entropy,
    get_chooser,
    list_neighbours,
    minmax,
    mse,
    percentile,
)
from optimizer.compress.simulate import fake_quantize
from optimizer.foundation.qtensor import FP16_SMALLEST_NORMAL
from optimizer.foundation.state import Range
from tests.conftest import heavy_tailed

METHODS = ("minmax", "percentile", "entropy", "mse")


def histogram_of(*parts: Tensor) -> MagnitudeHistogram:
    h = MagnitudeHistogram()
    for part in parts:
        h.update(part)
    return h


def same(a: MagnitudeHistogram, b: MagnitudeHistogram) -> bool:
    return torch.equal(a.counts, b.counts) and (a.exponent, a.low, a.high) == (
        b.exponent,
        b.low,
        b.high,
    )


@pytest.fixture(scope="module")
def values() -> Tensor:
    return heavy_tailed((4000, 16), seed=5, scale=1.0)


def test_order_and_batching_do_not_change_a_histogram(values: Tensor) -> None:
    small_first = values[values.abs().amax(1).argsort()]  # grows as often as it can
    assert same(histogram_of(values), histogram_of(*small_first.split(7)))


def test_merging_is_the_same_as_counting_everything_in_one(values: Tensor) -> None:
    small, large = histogram_of(values[:100] * 1e-3), histogram_of(values[100:])
    both = histogram_of(values[100:], values[:100] * 1e-3)
    small.merge(large)
    assert same(small, both)


def test_memory_does_not_depend_on_the_number_of_values(values: Tensor) -> None:
    h = histogram_of(values[:1])
    before = h.counts.shape
    h.update(values * 1e4)
    assert h.counts.shape == before == (2, BINS)
    assert h.total == values.numel() + values.shape[1]


def test_the_largest_value_lies_in_the_upper_half_of_the_bins(values: Tensor) -> None:
    h = histogram_of(values)
    assert BINS / 2 <= h.absmax / h.width < BINS


@pytest.mark.parametrize("share", [95.0, 99.0, 99.9, 99.99])
def test_a_symmetric_percentile_is_within_a_bin_of_the_exact_one(
    values: Tensor, share: float
) -> None:
    h = histogram_of(values)
    found = 127 * percentile(h, True, share).scale
    exact = float(values.double().abs().flatten().quantile(share / 100, interpolation="higher"))
    assert abs(found - exact) <= 2 * h.width + exact * 2**-8  # and the scale's own grid


@pytest.mark.parametrize("share", [95.0, 99.9])
def test_both_ends_of_a_percentile_are_within_a_bin_of_the_exact_ones(share: float) -> None:
    skewed = heavy_tailed((20000,), seed=6, scale=1.0).exp().clamp(max=50) - 0.2
    h = histogram_of(skewed)
    found, tail = percentile(h, False, share), (1 - share / 100) / 2
    assert found.high == pytest.approx(
        float(skewed.double().quantile(1 - tail, interpolation="higher")), abs=2 * h.width
    )
    assert found.low == pytest.approx(
        float(skewed.double().quantile(tail, interpolation="lower")), abs=2 * h.width
    )


def true_error(values: Tensor, covered: Range) -> float:
    return float((values - fake_quantize(values, covered)).square().mean())


def test_the_mse_range_beats_a_grid_of_clips_on_the_real_values(values: Tensor) -> None:
    found = true_error(values, mse(histogram_of(values), True))
    absmax = float(values.abs().max())
    grid = [true_error(values, Range.symmetric(absmax * k / 40)) for k in range(4, 41)]
    assert found <= min(grid) * 1.02
    assert found < 0.9 * grid[-1]  # clipping matters on this data, so the test can fail


def test_an_asymmetric_mse_range_beats_the_symmetric_one_on_one_sided_data() -> None:
    gelu = torch.nn.functional.gelu(heavy_tailed((50000,), seed=7, scale=1.5))
    h = histogram_of(gelu)
    assert true_error(gelu, mse(h, False)) < true_error(gelu, mse(h, True)) / 2


def test_entropy_keeps_all_of_a_uniform_distribution() -> None:
    h = histogram_of(torch.linspace(-3, 3, 200_001))
    assert entropy(h, False).high >= 0.98 * 3


def test_entropy_clips_a_tail_that_would_waste_the_levels() -> None:
    bulk = heavy_tailed((100_000,), seed=8, scale=1.0).clamp(-4, 4)
    h = histogram_of(bulk, torch.tensor([400.0]))
    assert entropy(h, False).high < 40
    assert minmax(h, False).high == 400


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_range_holds_zero_and_no_more_than_was_seen(
    method: str, symmetric: bool, values: Tensor
) -> None:
    choose = get_chooser(method, 99.9, symmetric)
    for data in (values, values.abs(), -values.abs(), torch.zeros(5), values[:1, :1]):
        covered = choose(histogram_of(data))
        absmax = float(data.abs().max())
        assert covered.low <= 0 <= covered.high
        assert (
            covered.high <= absmax * 1.01 + 128 * FP16_SMALLEST_NORMAL
        )  # the grid has a smallest scale
        assert not symmetric or not absmax or covered.zero_point == 128


@pytest.mark.parametrize("method", METHODS)
def test_a_range_scales_with_its_data(method: str, values: Tensor) -> None:
    choose = get_chooser(method, 99.9, False)
    one, four = choose(histogram_of(values)), choose(histogram_of(values * 4))
    assert (four.low, four.high) == pytest.approx((4 * one.low, 4 * one.high))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        histogram_of(torch.tensor([1.0, bad]))
    with pytest.raises(ValueError, match="NaN or infinity"):
        Channels(2).update(torch.tensor([[1.0, bad]]))


def test_channel_statistics_are_those_of_all_rows(values: Tensor) -> None:
    channels = Channels(16)
    for part in values.split(33):
        channels.update(part)
    assert torch.equal(channels.absmax, values.abs().amax(0))
    assert torch.allclose(channels.mean, values.double().mean(0).float(), atol=1e-7)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("method", ["mse", "entropy"])
def test_a_range_far_from_the_best_is_worse_than_those_tried_beside_it(
    method: str, symmetric: bool, values: Tensor
) -> None:
    h = histogram_of(values)
    best = get_chooser(method, 99.999, symmetric)(h)
    beside = [
        compute_excess_loss(method, h, other, best) for other in list_neighbours(method, h, best)
    ]
    assert compute_excess_loss(method, h, best, best) == 0
    for factor in (0.5, 0.7, 1.4, 2.0):
        far = Range(best.low * factor, best.high * factor)
        assert max(beside) < compute_excess_loss(method, h, far, best)


def test_minmax_needs_the_extremes_only() -> None:
    rows = heavy_tailed((64, 32), 3)
    counted, extended = MagnitudeHistogram(), MagnitudeHistogram()
    counted.update(rows)
    extended.extend(rows)
    assert minmax(extended, symmetric=False) == minmax(counted, symmetric=False)
    assert (extended.width, extended.total) == (counted.width, 0)
