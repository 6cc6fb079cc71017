"""Bound the distance between correct runs of a model: distances of examples, and an upper bound of
their population.

The distances of runs that each round at random (random_rounding.py) have logarithms that are about
normal; the limit is the one-sided tolerance bound of that population (Natrella 1963, Experimental
Statistics, 2-15): with confidence CONFIDENCE it lies above all but a share MISSED / looks of it,
where `looks` is the number of distances compared with limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]
UNIT = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Roundoff of a stored value: half the distance between neighbours at 1."""

RUNS = 4
CONFIDENCE = 0.99
MISSED = 1e-4
"""Probability that all limits of one hop together refuse a correct run."""
NOWHERE = float("inf")
CHUNK = 2**15  # values that stay in a core's cache while they are compared


Squares = tuple[float, float, int]
"""(squared distance, infinite where there is none; squared norm of the expected array; size)."""


def lengths(pairs: Iterable[tuple[Array, Array]], usual: float | None = None) -> list[float]:
    """Return the relative L2 distance of each pair (actual, expected), the measure of distance that
    every comparison of the toolchain shares; infinite for unequal shapes, NaN or infinity.

    usual: mean square of the values of a usual example; None: that of `pairs`

    The divisor is the larger of the example's norm and that of a usual example of its size, so that
    an example whose values nearly cancel gets no larger distance than the others.
    """
    return compare_lengths([squares(f, e) for f, e in pairs], usual)


@np.errstate(invalid="ignore")  # of two infinite values
def squares(actual: Array, expected: Array) -> Squares:
    """Compute the sums of squares from which a pair's distance follows, in float64."""
    if actual.shape != expected.shape:
        return (
            NOWHERE,
            sum(float(e @ e) for e, _ in iterate_chunks(expected, expected)),
            expected.size,
        )
    square = norm = 0.0
    for f, e in iterate_chunks(actual, expected):
        norm += float(e @ e)
        f -= e
        square += float(f @ f)
    return (square if math.isfinite(square + norm) else NOWHERE), norm, expected.size


def iterate_chunks(actual: Array, expected: Array) -> Iterator[tuple[Floats, Floats]]:
    """Yield both arrays in pieces of CHUNK values, as float64 copies that later pieces overwrite.
    Whole copies of the logits of a text would take hundreds of megabytes.

    actual, expected: arrays of one size
    """
    f, e = actual.reshape(-1), expected.reshape(-1)
    if 0 < e.size <= CHUNK:
        yield f.astype(np.float64), e.astype(np.float64)
        return
    copies = np.empty((2, CHUNK))
    for start in range(0, e.size, CHUNK):
        parts = copies[:, : e.size - start]
        parts[0], parts[1] = f[start : start + CHUNK], e[start : start + CHUNK]
        yield parts[0], parts[1]


def compare_lengths(each: Sequence[Squares], usual: float | None = None) -> list[float]:
    """Return the relative L2 distances of pairs, as `lengths` does, from their squares alone.

    usual: see `lengths`
    """
    norms, sizes = sum(norm for _, norm, _ in each), sum(size for _, _, size in each)
    usual = norms / max(sizes, 1) if usual is None else usual
    distances = []
    for square, norm, size in each:
        scale = max(norm, usual * size)
        apart = NOWHERE if not scale or square == NOWHERE else float(np.sqrt(square / scale))
        distances.append(0.0 if square == 0 else apart)
    return distances


def upper_bound(values: Sequence[float], independent: int, looks: int, unit: float) -> float:
    """Return a value that exceeds all but a share MISSED / looks of the population of `values`,
    with confidence CONFIDENCE. It is at least `unit`, and infinite for fewer than 3 values.

    independent: number of independent values among `values`
    looks: number of distances compared with limits
    unit: one roundoff

    Values that are 0 (runs of a saturated softmax agree to the bit) have no logarithm, and taken as
    very small they would make the others look scattered without end. A bound of the values above 0
    alone is one for all of them too, so the lower of the two bounds holds.
    """
    every = np.asarray(values, np.float64)
    if len(every) < 3 or not np.isfinite(every).all():
        return math.inf  # too few to know how they scatter
    moved = every[every > 0]
    if not len(moved):
        return unit
    bounds = [_lognormal_bound(every, independent, looks, unit)]
    if 3 <= len(moved) < len(every):
        bounds.append(_lognormal_bound(moved, independent * len(moved) // len(every), looks, unit))
    return max(unit, min(bounds))


def _lognormal_bound(values: Floats, independent: int, looks: int, unit: float) -> float:
    """Return the tolerance bound for values whose logarithms are approximately normal. Arguments
    are those of `upper_bound`."""
    logs = np.log(np.maximum(values, unit * 1e-3))
    factor = tolerance_factor(max(independent, 3), 1 - MISSED / max(looks, 1))
    with np.errstate(over="ignore"):
        return float(np.exp(logs.mean() + factor * logs.std(ddof=1)))


def normal_bound(values: Sequence[float], looks: int) -> float:
    """Return the bound of `upper_bound` for values that are approximately normal, such as shares of
    a total."""
    if len(values) < 3:
        return math.inf
    factor = tolerance_factor(len(values), 1 - MISSED / max(looks, 1))
    return float(np.mean(values)) + factor * float(np.std(values, ddof=1))


def tolerance_factor(values: int, share: float) -> float:
    """Return the factor k of a tolerance bound: with probability CONFIDENCE, mean + k * standard
    deviation of a sample of normal values lies above a share `share` of their population.

    values: number of values in the sample
    """
    normal = NormalDist()
    z, sure = normal.inv_cdf(share), normal.inv_cdf(CONFIDENCE)
    a = 1 - sure**2 / (2 * (values - 1))
    if a <= 0.1:  # too few values for the approximation
        return 10 * z
    return (z + math.sqrt(z**2 - a * (z**2 - sure**2 / values))) / a
