"""Static ranges that differ from their method's choice are refused, for every method."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from optimizer.compress.methods.activations.activation_ranges import (
    MagnitudeHistogram,
    get_chooser,
    minmax,
)
from optimizer.foundation.state import CompressedState, Range
from optimizer.recipe.schema import Activations
from optimizer.validate.ledger.laws.calibration_laws import (
    COMMON,
    FINISHED,
    FLOAT,
    REST,
    Findings,
)
from optimizer.validate.ledger.laws.range_laws import RangeLaw
from tests.conftest import heavy_tailed

METHODS = ("minmax", "percentile", "entropy", "mse")
FAULTS = [
    (method, end, by)
    for method in METHODS
    for end in ("low", "high", "both")
    for by in (0.25, 4.0)
    # The nats that entropy counts are as few at a quarter of both ends, and at four times the end
    # beyond which nothing was seen, as between its choices for two modules of such inputs.
    if (method, end, by) not in (("entropy", "both", 0.25), ("entropy", "high", 4.0))
]


def inputs(module: int) -> Tensor:
    return heavy_tailed((400, 64), module, 1.0 + module / 4)


def noisy(rows: Tensor, seed: int, by: float = 0.01) -> Tensor:
    """A module's input after quantization before it."""
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed))
    return rows * (1 + by * noise)


def minmax_of(rows: Tensor) -> Range:
    histogram = MagnitudeHistogram()
    histogram.extend(rows)
    return minmax(histogram, symmetric=False)


@cache
def chosen(section: Activations, module: int) -> Range:
    histogram = MagnitudeHistogram()
    histogram.update(noisy(inputs(module), 1000 + module))
    return get_chooser(section.range, section.percentile, section.symmetric)(histogram)


def findings(method: str, low: float = 1.0, high: float = 1.0, modules: int = 12) -> Findings:
    """The law's findings where the first module's ends are multiplied by low and high."""
    section = Activations(range=method)
    ranges = {f"layer.{i}:input": chosen(section, i) for i in range(modules)}
    kept = ranges["layer.0:input"]
    ranges["layer.0:input"] = Range(kept.low * low, kept.high * high)
    law = RangeLaw(CompressedState({}, ranges=ranges, activations="tensor"), section)
    for i in range(modules):
        law.see((FINISHED, COMMON), f"layer.{i}", noisy(inputs(i), i))
        law.see((FLOAT,), f"layer.{i}", inputs(i))
    return law.findings()


@pytest.mark.parametrize("method", METHODS)
def test_ranges_that_the_method_chose_are_refused_by_none(method: str) -> None:
    assert findings(method) == Findings([], [])


@pytest.mark.parametrize(("method", "end", "by"), FAULTS)
def test_a_range_with_a_wrong_end_is_refused_and_named(method: str, end: str, by: float) -> None:
    low, high = by if end != "high" else 1.0, by if end != "low" else 1.0
    (problem,) = findings(method, low, high).problems
    assert problem.startswith("layer.0:input: ")


def fitted(noise: float, wrong: float = 1.0, seed: int = 0) -> Findings:
    """The law's findings on 24 modules. Factors (smoothquant with strength 1) bring the first
    one's channels to one extreme on inputs with `noise`, and the finished model's inputs have as
    much noise again; its range is multiplied by `wrong`."""
    exact = heavy_tailed((400, 64), 5000 + seed)
    rows = noisy(exact, 1000 + seed, noise)
    factor = 1 / rows.abs().amax(0)
    kept = minmax_of(rows * factor)
    section = Activations(range="minmax")
    ranges = {f"layer.{i}:input": chosen(section, i) for i in range(24)}
    ranges["layer.0:input"] = Range(kept.low * wrong, kept.high * wrong)
    state = CompressedState({}, {}, ranges, {"layer.0:input": factor}, activations="tensor")
    law = RangeLaw(state, section)
    law.see((FINISHED, COMMON), "layer.0", noisy(rows, 2000 + seed, noise))
    law.see((FLOAT,), "layer.0", exact)
    for i in range(1, 24):
        law.see((FINISHED, COMMON), f"layer.{i}", noisy(inputs(i), i))
        law.see((FLOAT,), f"layer.{i}", inputs(i))
    return law.findings()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_a_range_that_factors_were_fitted_to_may_move_as_its_channels_do(
    noise: float, seed: int
) -> None:
    assert fitted(noise, seed=seed) == Findings([], [])


@pytest.mark.parametrize("wrong", [0.5, 2.0])
@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_a_wrong_range_that_factors_were_fitted_to_is_refused(noise: float, wrong: float) -> None:
    """The range is too narrow for all channels at once, or too wide, which no movement of a few
    explains."""
    (problem,) = fitted(noise, wrong).problems
    assert problem.startswith("layer.0:input: ")


@pytest.mark.parametrize(("wrong", "refused"), [(1.0, False), (4.0, True), (0.25, True)])
def test_a_range_that_one_token_sets_is_judged_by_its_movement_over_all_batches(
    wrong: float, refused: bool
) -> None:
    """The token lies in a batch that runs through the float model only where a law doubts."""
    section = Activations(range="percentile")
    ranges = {f"layer.{i}:input": chosen(section, i) for i in range(12)}
    outlier = inputs(0).clone()
    outlier[-1] *= 3
    histogram = MagnitudeHistogram()
    histogram.update(outlier)
    kept = get_chooser(section.range, section.percentile, section.symmetric)(histogram)
    ranges["layer.0:input"] = Range(kept.low * wrong, kept.high * wrong)
    law = RangeLaw(CompressedState({}, ranges=ranges, activations="tensor"), section)
    for i in range(12):
        law.see((FINISHED, COMMON), f"layer.{i}", noisy(inputs(i)[:100], i))
        law.see((FLOAT,), f"layer.{i}", inputs(i)[:100])
        law.see((FINISHED,), f"layer.{i}", noisy(inputs(i)[100:], 100 + i))
    assert law.findings().problems
    assert law.doubtful() == ("layer.0",)
    law.see((REST,), "layer.0", outlier[100:])
    assert bool(law.findings().problems) == refused


def test_modules_that_read_one_tensor_are_one_range() -> None:
    section = Activations(range="minmax")
    ranges = {f"{name}.{i}:input": chosen(section, i) for i in range(2) for name in "qkv"}
    law = RangeLaw(CompressedState({}, ranges=ranges, activations="tensor"), section)
    for i in range(2):
        finished, float_ = noisy(inputs(i), i), inputs(i)
        for name in "qkv":
            law.see((FINISHED, COMMON), f"{name}.{i}", finished)
        for name in "qkv":
            law.see((FLOAT,), f"{name}.{i}", float_)
    (unjudged,) = law.findings().unjudged
    assert unjudged == "2 static ranges, too few to measure how quantization moves them"


def test_the_channels_of_images_are_their_second_axis_whatever_their_size() -> None:
    """The finished model's images are the float one's moved by a pixel, which moves no extreme."""
    images = [[heavy_tailed((2, 3, n, n), seed=10 * i + n) for n in (5, 7)] for i in range(12)]
    moved = [[noisy(x.roll(1, dims=3), i) for x in of] for i, of in enumerate(images)]
    kept = [minmax_of(torch.cat([x.flatten() for x in of])) for of in moved]
    kept[0] = Range(2 * kept[0].low, 2 * kept[0].high)
    ranges = {f"layer.{i}:input": of for i, of in enumerate(kept)}
    law = RangeLaw(
        CompressedState({}, ranges=ranges, activations="tensor"), Activations(range="minmax")
    )
    for i in range(12):
        for finished, exact in zip(moved[i], images[i], strict=True):
            law.see((FINISHED, COMMON), f"layer.{i}", finished)
            law.see((FLOAT,), f"layer.{i}", exact)
    (problem,) = law.findings().problems
    assert problem.startswith("layer.0:input: ")


def test_two_ranges_are_too_few_to_be_judged_and_that_is_said() -> None:
    (reason,) = findings("minmax", high=4.0, modules=2).unjudged
    assert reason == "2 static ranges, too few to measure how quantization moves them"
