"""What the candidate did on each example, in their order: `each` of a report's quality section.

Two bundles that were judged on the same rows are compared by it, example by example
(publish/comparison.py). Only of metrics that are a mean over examples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

DECIMALS = 6


def right(outcomes: Iterable[object]) -> dict[str, Any]:
    """Of right and wrong: a text of 1 and 0."""
    return {"kind": "right", "candidate": "".join("1" if o else "0" for o in outcomes)}


def values(kind: str, each: Iterable[float]) -> dict[str, Any]:
    """Of numbers. kind: "cosine" to the float model, or "nats" per token of each window."""
    return {"kind": kind, "candidate": [round(float(value), DECIMALS) for value in each]}


def summary(cosines: npt.NDArray[np.float64]) -> dict[str, float]:
    """Of the cosines (examples,) together."""
    return {
        "mean": float(cosines.mean()),
        "min": float(cosines.min()),
        "p01": float(np.quantile(cosines, 0.01)),
    }
