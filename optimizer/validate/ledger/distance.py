"""Measure the distance of two arrays, over everything and for the worst example.

pairs of (actual, expected) arrays, one per example -> Distance
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optimizer.foundation.rounding.tolerance import NOWHERE as NOWHERE
from optimizer.foundation.rounding.tolerance import Squares, compare_lengths, iterate_chunks
from optimizer.foundation.rounding.tolerance import lengths as lengths

Array = npt.NDArray[np.generic]
WHOLE = 1.0  # distance of zeros from any values, which a limit of this or more accepts


@dataclass(frozen=True)
class Distance:
    """Distance of actual arrays to expected ones: infinite (cosine -1) for NaN or another shape."""

    relative_l2: float  # |actual - expected| / |expected| over all examples together
    max_abs: float  # largest difference of an element
    cosine: float  # smallest cosine of an example
    worst: float  # largest L2 distance of an example over its norm, or a usual norm if larger

    def as_dict(self) -> dict[str, float]:
        return {
            "relative_l2": self.relative_l2,
            "max_abs": self.max_abs,
            "cosine": self.cosine,
            "worst_example": self.worst,
        }


FAR = Distance(NOWHERE, NOWHERE, -1.0, NOWHERE)


@np.errstate(invalid="ignore")  # of two infinite values
def measure_distance(pairs: Iterable[tuple[Array, Array]]) -> Distance:
    """Measure the distance of one output over all examples.

    pairs: (actual, expected) of each example, of any shape

    The distance of an example is relative to its expected norm, or to the norm of a usual example
    of its size where that is larger: values of a single example may cancel.
    """
    each, largest, cosine = list[Squares](), 0.0, 1.0
    for actual, expected in pairs:
        if actual.shape != expected.shape:
            return FAR
        square = norm = length = product = highest = 0.0
        for f, e in iterate_chunks(actual, expected):
            norm += float(e @ e)
            length += float(f @ f)
            product += float(f @ e)
            f -= e
            square += float(f @ f)
            highest = max(highest, float(np.abs(f, out=f).max()))
        if not math.isfinite(square + norm):
            return FAR
        each.append((square, norm, expected.size))
        if square:
            scale = math.sqrt(length * norm)
            cosine = min(cosine, product / scale if scale else 0.0)
            largest = max(largest, highest)
    apart, norms = sum(square for square, _, _ in each), sum(norm for _, norm, _ in each)
    whole = float(np.sqrt(apart / norms)) if norms else NOWHERE
    return Distance(
        whole if apart else 0.0, largest, cosine, max(compare_lengths(each), default=0.0)
    )


def split_examples(array: Array, mask: Array) -> list[Array]:
    """Split a compared array (batch, ...) into one array per row. Of an array (batch, sequence,
    ...) each row has only its real tokens.

    mask: (batch, sequence), 1 for real tokens and 0 for padding; (batch,) without padding
    """
    if array.ndim >= 3 and array.shape[:2] == mask.shape:
        return [
            row if keep.all() else row[keep.astype(bool)]
            for row, keep in zip(array, mask, strict=True)
        ]
    return list(array)


def merge(distances: Iterable[Distance]) -> Distance:
    """Return the worst value of each field over several distances: the smallest cosine, the largest
    of the other fields."""
    each = list(distances)
    return Distance(
        max(d.relative_l2 for d in each),
        max(d.max_abs for d in each),
        min(d.cosine for d in each),
        max(d.worst for d in each),
    )
