"""Judge the quantizer piece of a module, float input -> integers, integer by integer.

    t = (x factor - offset) / step          integer = clamp(round(t) + zero_point, low, high)

with ties to even. Each operation rounds once, so arithmetic of unit roundoff u computes t within

    delta = u (|x factor| [factor] + |x factor - offset| (1 + [offset])) / step

([.]: 1 where the quantizer has one). Per token the step is computed too: u |t| (2 + 2 [factor]).
OpenVINO's FakeQuantize (src/plugins/intel_cpu/src/nodes/fake_quantize.cpp) computes x (factor /
step) - (offset / step + low - zero_point), with both constants rounded before, so within

    delta = u (|x factor| (3 + [factor]) + 3 |offset| + 2 |x factor - offset|) / step
            + 2 u (zero_point - low)

An integer must be the reference's. Where the reference's t lies within delta of a rounding tie it
may be the next one (a flip). Where every operation is exact, delta is 0, so ties and both ends of
the range are judged to the bit.

A rounding error spread evenly over [-delta, delta] flips one in four of the integers near a tie,
and a shift by delta half of them: more flips than a binomial at 1/4 allows are a fault. Equal
values of t are rounded equally (the first token of every text gives the same row), so each counts
once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.validate.ledger.pieces.roundoff import UNIT

Array = NDArray[Any]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

FLIP_RATE = 0.25
MISSED = 1e-9
"""Probability that correct rounding flips more than the allowed number."""


@dataclass(frozen=True)
class Quantizer:
    """Scale, zero point and types of the quantizer of one module's input, in the notation at the
    top of this file."""

    step: float | None  # None per token, max |x| / 127 of each row
    zero_point: int
    low: int
    high: int
    unit: float  # unit roundoff of its arithmetic
    offset: float = 0.0  # subtracted by the graph; 0.0 in dialects with a zero point
    factor: Array | None = None
    reciprocal: bool = False  # True for the formula of FakeQuantize


@dataclass(frozen=True)
class ReferenceIntegers:
    """Expected integers of an input (tokens, in), with the error bound of each element."""

    real: Floats  # t + zero_point
    delta: Floats  # error bound of each element
    integers: Integers
    step: Floats  # step of each row (tokens, 1)


@dataclass(frozen=True)
class Judgement:
    """Result of comparing the integers that a runtime's quantizer gave with the expected ones."""

    elements: int
    ties: frozenset[float]  # different values (t + zero_point) near a tie
    flipped: frozenset[float]  # those that got the other integer
    wrong: int  # number of integers that no rounding explains
    at: tuple[tuple[int, int], ...]  # (token, channel) of the first wrong ones

    @property
    def near_ties(self) -> int:
        """Number of different values so near to a tie that rounding to either integer is right."""
        return len(self.ties)

    @property
    def flips(self) -> int:
        """Number of values near a tie that the runtime rounded to the other integer than the
        reference."""
        return len(self.flipped)

    @property
    def flips_allowed(self) -> int:
        """Largest number of flips that a correct runtime may show."""
        return bound_flips(self.near_ties)

    @property
    def ratio(self) -> float:
        """Measured over limit: the logarithm of the flips' probability as a share of that of
        MISSED; above 1 where an integer is wrong."""
        if self.wrong:
            return 1.0 + self.wrong
        if not self.flips:
            return 0.0
        return self.near_ties * _divergence(self.flips / self.near_ties) / -math.log(MISSED)

    @property
    def counts(self) -> dict[str, int]:
        return {
            "elements": self.elements,
            "near_ties": self.near_ties,
            "flips": self.flips,
            "flips_allowed": self.flips_allowed,
            "wrong": self.wrong,
        }


def compute_reference(x: Array, q: Quantizer) -> ReferenceIntegers:
    """Compute the expected integers of x (tokens, in), in the type of the graph's input."""
    t, step, size = _scaled(x, q)
    delta = np.where(_exact(x, q), 0.0, q.unit * size)
    return ReferenceIntegers(t + q.zero_point, delta, _integers(t, q), step)


def compute_integers(x: Array, q: Quantizer) -> tuple[Integers, Floats]:
    """Compute (the expected integers that q gives x, the step of each row (tokens, 1))."""
    t, step, _ = _scaled(x, q)
    return _integers(t, q), step


def _scaled(x: Array, q: Quantizer) -> tuple[Floats, Floats, Floats]:
    """Compute a judged quantizer's (t, the step of each row, delta in units of roundoff), in the
    notation at the top of this file."""
    values = x.astype(np.float64)
    scaled = values if q.factor is None else values * q.factor.astype(np.float64)
    has_factor, has_offset = q.factor is not None, q.offset != 0
    if q.step is None:
        step = np.abs(scaled).max(1, keepdims=True) / 127
        step = np.where(step > 0, step, 1.0)
        t = scaled / step
        return t, step, np.abs(t) * (2 + 2 * has_factor)
    step = np.full((len(values), 1), q.step)
    centred = scaled - q.offset
    if q.reciprocal:
        moved = np.abs(scaled) * (3 + has_factor) + 3 * abs(q.offset) + 2 * np.abs(centred)
        return centred / step, step, moved / step + 2 * (q.zero_point - q.low)
    size = np.abs(scaled) * has_factor + np.abs(centred) * (1 + has_offset)
    return centred / step, step, size / step


def _integers(t: Floats, q: Quantizer) -> Integers:
    return np.asarray(np.clip(np.rint(t) + q.zero_point, q.low, q.high), np.int64)


EXACT_IN = {UNIT["fp32"]: np.float32, UNIT["fp16"]: np.float16}


def _exact(x: Array, q: Quantizer) -> NDArray[np.bool_]:
    """Return a mask (tokens, in), True where q's operations give no rounding error in the float
    type q.unit stands for."""
    kind = EXACT_IN.get(q.unit)
    if kind is None or q.reciprocal:  # 1 / step is rarely exact
        return np.zeros(x.shape, bool)
    same = x.astype(kind) == x
    x = x.astype(kind)
    scaled, wide = x, x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if q.factor is not None:
            scaled = x * q.factor.astype(kind)
            wide = wide * q.factor.astype(np.float64)
            same &= wide == scaled
        if q.step is None:
            largest = np.abs(wide).max(1, keepdims=True)
            step = np.abs(scaled).max(1, keepdims=True) / kind(127)
            same = same & (step.astype(np.float64) * 127 == largest) & (step > 0)
        else:
            step = np.full((len(x), 1), q.step, kind)
            same = same & (step == q.step)
        centred = scaled - kind(q.offset)
        same &= wide - q.offset == centred
        t = centred / step
        return np.asarray(same & (t.astype(np.float64) * step == centred))


def quantize_zero(q: Quantizer) -> int:
    """Return the expected integer that q, which has one step for all rows, gives 0: the padding of
    images."""
    assert q.step is not None
    return round(-q.offset / q.step) + q.zero_point


def judge(
    integers: Array, expected: ReferenceIntegers, q: Quantizer, count_flips: bool = True
) -> Judgement:
    """Compare integers (tokens, in) of a graph with their reference.

    count_flips: False for probes, which lie at ties on purpose
    """
    actual = integers.astype(np.int64)
    t = expected.real - q.zero_point
    least, most = (
        np.clip(np.rint(edge) + q.zero_point, q.low, q.high)
        for edge in (t - expected.delta, t + expected.delta)
    )
    wrong = (actual < least) | (actual > most)
    near_tie = (least != most) & count_flips
    flipped = near_tie & ~wrong & (actual != expected.integers)
    at = tuple((int(r), int(c)) for r, c in np.argwhere(wrong)[:3])
    ties, others = (frozenset(expected.real[where].tolist()) for where in (near_tie, flipped))
    return Judgement(actual.size, ties, others, int(wrong.sum()), at)


def merge(judgements: list[Judgement]) -> Judgement:
    """Join the judgements of several quantizers of one module by adding their counts."""
    return Judgement(
        sum(j.elements for j in judgements),
        frozenset().union(*(j.ties for j in judgements)),
        frozenset().union(*(j.flipped for j in judgements)),
        sum(j.wrong for j in judgements),
        next((j.at for j in judgements if j.at), ()),
    )


def bound_flips(near_ties: int) -> int:
    """Return the largest number m of flips that correct rounding may cause near `near_ties` ties:
    the largest m with P(Binomial(near_ties, FLIP_RATE) >= m) > MISSED, by Chernoff's bound: n KL(m
    / n, rate) <= -log(MISSED)."""
    enough = -math.log(MISSED)
    low, high = int(near_ties * FLIP_RATE), near_ties
    while low < high:
        middle = (low + high + 1) // 2
        if near_ties * _divergence(middle / near_ties) <= enough:
            low = middle
        else:
            high = middle - 1
    return low


def _divergence(share: float) -> float:
    """Compute KL(share, FLIP_RATE) of two Bernoulli variables; 0 where share is below the rate."""
    if share <= FLIP_RATE:
        return 0.0
    other = (1 - share) * math.log((1 - share) / (1 - FLIP_RATE)) if share < 1 else 0.0
    return share * math.log(share / FLIP_RATE) + other


def list_probes(q: Quantizer, width: int) -> NDArray[np.float32]:
    """Return a judged quantizer's inputs (rows, width) float32 that hold every tie between two
    integers, and values far beyond both ends. Real activations contain few of either."""
    ties = np.arange(q.low - q.zero_point - 2, q.high - q.zero_point + 3) + 0.5
    if q.step is None:
        ties = np.arange(-127, 127) + 0.5
        rows = -(-len(ties) // max(width - 1, 1))
        values = np.resize(ties, rows * (width - 1)).reshape(rows, -1)
        t = np.concatenate([np.full((rows, 1), 127.0), values], 1)
        t = np.concatenate([t, -t])  # the largest magnitude of a row may be negative
        step, offset = 1.0, 0.0
    else:
        far = 4.0 * (q.high - q.low)
        ends = np.array([-far, far])
        values = np.concatenate([ends, ties])
        rows = -(-len(values) // width)
        t = np.resize(values, rows * width).reshape(rows, width)
        step, offset = q.step, q.offset
    x = t * step + offset
    return np.asarray(x if q.factor is None else x / q.factor, np.float32)
