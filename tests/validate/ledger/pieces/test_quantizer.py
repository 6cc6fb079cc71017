"""Integers of correct arithmetic are accepted for any rounding; a shifted quantizer is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optimizer.validate.ledger.pieces import quantizer
from optimizer.validate.ledger.pieces.quantizer import (
    FLIP_RATE,
    MISSED,
    Quantizer,
    bound_flips,
    judge,
)
from optimizer.validate.ledger.pieces.roundoff import UNIT
from tests.conftest import heavy_tailed

STEP = 0.03466796875
UNSIGNED = Quantizer(STEP, 117, 0, 255, UNIT["fp32"])
SIGNED = Quantizer(STEP, 0, -128, 127, UNIT["fp32"], offset=0.4371)
TOKEN = Quantizer(None, 128, 0, 255, UNIT["fp32"])


def values(seed: int, tokens: int = 40) -> Any:
    return heavy_tailed((tokens, 96), seed, 1.0).numpy()


def computed(x: Any, q: Quantizer, kind: Any = np.float32, halves: Any = np.rint) -> Any:
    """Compute operation by operation in this type."""
    x = x.astype(kind)
    if q.factor is not None:
        x = x * q.factor.astype(kind)
    x = x - kind(q.offset)
    step = (np.abs(x).max(1, keepdims=True) / kind(127)) if q.step is None else kind(q.step)
    return np.clip(halves((x / step).astype(np.float64)) + q.zero_point, q.low, q.high)


def fake_quantized(x: Any, q: Quantizer) -> Any:
    """Compute as OpenVINO's FakeQuantize: one multiplication and one addition of constants."""
    factor = np.float32(1) if q.factor is None else q.factor.astype(np.float32)
    step, low = np.float32(q.step), np.float32(q.low - q.zero_point)
    scale = factor * (np.float32(255) / (step * np.float32(255)))
    shift = -np.float32(q.offset) * (np.float32(1) / step) - low
    return np.clip(np.rint(x.astype(np.float32) * scale + shift) + q.low, q.low, q.high)


def away_from_zero(t: Any) -> Any:
    return np.sign(t) * np.floor(np.abs(t) + 0.5)


def judged(integers: Any, x: Any, q: Quantizer, count_flips: bool = True) -> quantizer.Judgement:
    return judge(integers, quantizer.compute_reference(x, q), q, count_flips)


QUANTIZERS = {
    "zero point": UNSIGNED,
    "offset": SIGNED,
    "factor and offset": replace(SIGNED, factor=1 + 0.1 * np.cos(np.arange(96, dtype=np.float32))),
    "per token": TOKEN,
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_arithmetic_that_rounds_every_operation_is_never_refused(name: str) -> None:
    q = QUANTIZERS[name]
    worst = [judged(computed(values(seed), q), values(seed), q).ratio for seed in range(60)]
    assert max(worst) <= 1


BY_RECIPROCAL = [
    replace(QUANTIZERS[name], reciprocal=True, zero_point=0, low=-128, high=127)
    for name in ("offset", "factor and offset")
] + [
    replace(UNSIGNED, reciprocal=True),
    replace(
        UNSIGNED, reciprocal=True, zero_point=255, factor=QUANTIZERS["factor and offset"].factor
    ),
]


@pytest.mark.parametrize("q", BY_RECIPROCAL)
def test_arithmetic_by_the_reciprocal_is_never_refused(q: Quantizer) -> None:
    worst = [judged(fake_quantized(values(seed), q), values(seed), q).ratio for seed in range(60)]
    assert max(worst) <= 1
    ties = quantizer.list_probes(q, 96)
    assert not judged(fake_quantized(ties, q), ties, q, count_flips=False).wrong


@pytest.mark.parametrize("q", BY_RECIPROCAL)
def test_another_quantizer_by_the_reciprocal_is_refused(q: Quantizer) -> None:
    x = values(3)
    assert judged(fake_quantized(x, replace(q, step=float(q.step or 0) * 1.005)), x, q).ratio > 1
    assert judged(fake_quantized(x, replace(q, offset=q.offset + 2e-4)), x, q).ratio > 1


def test_float16_arithmetic_is_never_refused_and_flips_integers() -> None:
    q = Quantizer(STEP, 0, -128, 127, UNIT["fp16"], offset=0.4375)
    inputs = [values(seed, 200).astype(np.float16) for seed in range(30)]
    found = [judged(computed(x, q, np.float16), x, q) for x in inputs]
    assert max(j.ratio for j in found) <= 1
    assert sum(j.flips for j in found) > 100


@pytest.mark.parametrize("q", [UNSIGNED, SIGNED])
@pytest.mark.parametrize(
    "change",
    [
        lambda q: replace(q, step=q.step * 1.005),
        lambda q: replace(q, zero_point=q.zero_point + 1),
        lambda q: replace(q, offset=q.offset + q.step / 2),
        lambda q: replace(q, offset=q.offset + q.step / 100),
    ],
)
def test_another_quantizer_is_refused(q: Quantizer, change: Any) -> None:
    x = values(3)
    assert judged(computed(x, change(q)), x, q).ratio > 1


def test_ties_that_go_away_from_zero_are_refused_on_the_probes() -> None:
    for q in (UNSIGNED, replace(SIGNED, offset=0.0), TOKEN):
        x = quantizer.list_probes(q, 96)
        assert not judged(computed(x, q), x, q, count_flips=False).wrong
        assert judged(computed(x, q, halves=away_from_zero), x, q, count_flips=False).wrong


@pytest.mark.parametrize("end", ["low", "high"])
def test_saturation_one_early_is_refused_on_the_probes(end: str) -> None:
    for q in (UNSIGNED, SIGNED):
        x = quantizer.list_probes(q, 96)
        early = replace(q, low=q.low + 1) if end == "low" else replace(q, high=q.high - 1)
        assert judged(computed(x, early), x, q, count_flips=False).wrong


@pytest.mark.parametrize("width", [96, 1024])
def test_a_row_by_its_largest_value_and_not_magnitude_is_refused_on_the_probes(width: int) -> None:
    x = quantizer.list_probes(TOKEN, width)
    step = x.max(1, keepdims=True) / 127
    integers = np.clip(np.rint(x / step) + 128, 0, 255)
    assert judged(integers, x, TOKEN, count_flips=False).wrong


def test_a_shift_hidden_among_ties_is_refused_by_how_many_it_moves() -> None:
    q = Quantizer(STEP, 0, -128, 127, UNIT["fp16"])
    x = np.random.default_rng(1).uniform(-3.9, 3.9, (400, 96)).astype(np.float16)
    wanted = quantizer.compute_reference(x, q)
    moved = np.clip(np.rint(wanted.real + wanted.delta), q.low, q.high)
    found = judge(moved, wanted, q)
    assert found.wrong == 0
    assert found.ratio > 1


def test_a_value_that_returns_in_many_rows_is_one_value_beside_a_tie() -> None:
    """Every text has the same first token: a flip there is a flip in every row."""
    q = Quantizer(0.0137, 0, -128, 127, UNIT["fp32"])
    middles = ((np.arange(100) + 0.5) * 0.0137).astype(np.float32)[:, None]
    wanted = quantizer.compute_reference(middles, q)
    tie = min(judge(wanted.integers, wanted, q).ties)
    middle = int(np.argmax(wanted.real == tie))
    other = 2 * middle + 1 - int(wanted.integers[middle, 0])
    x = np.full((60, 4), middles[middle, 0], np.float32)
    found = judge(np.full(x.shape, other), quantizer.compute_reference(x, q), q)
    assert found.near_ties == found.flips == 1
    assert found.ratio <= 1
    assert quantizer.merge([found, found]) == replace(found, elements=2 * x.size)


def test_a_row_whose_largest_value_rounds_is_not_exact() -> None:
    """Its step in float32 is exactly one, and 55.5 a tie; in exact arithmetic neither is."""
    factors = np.array([0.8671875, 1 / 3], np.float32)
    q, x = replace(TOKEN, factor=factors), np.array([[64, 381]], np.float32)
    assert (x * factors).tolist() == [[55.5, 127]]
    assert judged(computed(x, q), x, q).wrong == 0


@pytest.mark.parametrize("ties", [0, 1, 7, 40, 300])
def test_more_flips_than_allowed_are_rarer_than_the_bound_says(ties: int) -> None:
    def more(than: int) -> float:
        counts = range(than + 1, ties + 1)
        return sum(
            math.comb(ties, k) * FLIP_RATE**k * (1 - FLIP_RATE) ** (ties - k) for k in counts
        )

    allowed = bound_flips(ties)
    assert more(allowed) <= MISSED
    assert allowed == ties or more(allowed - ties // 10 - 2) > MISSED**1.5  # and not by far


def test_inputs_of_one_module_are_judged_together() -> None:
    parts = [judged(computed(values(s), UNSIGNED), values(s), UNSIGNED) for s in (1, 2)]
    whole = quantizer.merge(parts)
    assert whole.elements == sum(p.elements for p in parts)
    assert whole.flips_allowed == bound_flips(sum(p.near_ties for p in parts))
