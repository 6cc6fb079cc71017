"""How far two arrays are from each other, seen so that an average hides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
NOWHERE = float("inf")


@dataclass(frozen=True)
class Distance:
    """relative_l2 over everything; worst: the largest relative L2 of a single example; cosine: the
    smallest of a single example. NaN or a different shape counts as infinitely far."""

    relative_l2: float
    max_abs: float
    cosine: float
    worst: float

    def as_dict(self) -> dict[str, float]:
        return {
            "relative_l2": self.relative_l2,
            "max_abs": self.max_abs,
            "cosine": self.cosine,
            "worst_example": self.worst,
        }


FAR = Distance(NOWHERE, NOWHERE, -1.0, NOWHERE)


def distance(pairs: Iterable[tuple[Array, Array]]) -> Distance:
    """Of (found, expected) pairs, one per example, each of any shape."""
    squares, norms, worst, biggest, cosine = 0.0, 0.0, 0.0, 0.0, 1.0
    for found, expected in pairs:
        if found.shape != expected.shape:
            return FAR
        a, b = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return FAR
        if np.array_equal(a, b):
            norms += float(b @ b)
            continue
        d = a - b
        square, norm = float(d @ d), float(b @ b)
        squares, norms = squares + square, norms + norm
        worst = max(worst, float(np.sqrt(square / norm)) if norm else NOWHERE)
        biggest = max(biggest, float(np.abs(d).max()))
        length = float(np.sqrt(norm * (a @ a)))
        cosine = min(cosine, float(a @ b) / length if length else 0.0)
    total = 0.0 if squares == 0 else float(np.sqrt(squares / norms)) if norms else NOWHERE
    return Distance(total, biggest, cosine, worst)


def examples(array: Array, mask: Array) -> list[Array]:
    """An array (batch, sequence, ...) as one array of real tokens per row; others row by row."""
    if array.ndim >= 3 and array.shape[:2] == mask.shape:
        return [row[keep.astype(bool)] for row, keep in zip(array, mask, strict=True)]
    return list(array)


def typical(pairs: Iterable[tuple[Array, Array]], share: float = 0.75) -> Distance:
    """As `distance`, with a row (token) as the example and `worst` the quantile `share` of them.

    For coded inputs, where float rounding at a tie moves a code of one token in many by a step; a
    fault of a linear module moves every token.
    """
    rows = [(f, e) for found, expected in pairs for f, e in zip(found, expected, strict=True)]
    whole = distance(rows)
    each = [distance([row]).worst for row in rows]
    far = sorted(each)[min(int(share * len(each)), len(each) - 1)] if each else 0.0
    return replace(whole, worst=far) if whole is not FAR else whole


def merged(found: Iterable[Distance]) -> Distance:
    """The furthest of several, in each of its numbers."""
    each = list(found)
    return Distance(
        max(d.relative_l2 for d in each),
        max(d.max_abs for d in each),
        min(d.cosine for d in each),
        max(d.worst for d in each),
    )
