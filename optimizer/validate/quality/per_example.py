"""What the candidate did on each example, in their order: `each` of a report's quality section.

Two bundles that were judged on the same rows are compared by it, example by example
(publish/environments/comparison.py).

    kind      candidate                                          truth
    right     a text of 1 and 0
    cosine    numbers, to the float model's answer
    nats      numbers, per token of each window
    labels    a text of label ids for each example: "0 3 3"      the same of what is right
    scores    numbers, of which the order counts                 the scores of the data
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def labels(
    truth: Sequence[npt.NDArray[Any]], predicted: Sequence[npt.NDArray[Any]]
) -> dict[str, Any]:
    """Of label ids (words,) of each example, one where a text has one label."""
    lists = [[" ".join(str(int(i)) for i in ids) for ids in part] for part in (truth, predicted)]
    return {"kind": "labels", "truth": lists[0], "candidate": lists[1]}


def scores(truth: npt.NDArray[np.float64], predicted: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Of numbers whose order counts: not rounded, which would make ties."""
    return {"kind": "scores", "truth": truth.tolist(), "candidate": predicted.tolist()}


def read_labels(texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
    """The label ids (words,) of each text that `labels` wrote. Raises ValueError."""
    return [np.array([int(i) for i in text.split()], np.int64) for text in texts]


def summary(cosines: npt.NDArray[np.float64]) -> dict[str, float]:
    """Of the cosines (examples,) together."""
    return {
        "mean": float(cosines.mean()),
        "min": float(cosines.min()),
        "p01": float(np.quantile(cosines, 0.01)),
    }
