"""Record the candidate's result on each example, in their order: `each` of a quality section.

Two bundles that were judged on the same rows are compared by it, example by example
(publish/environments/comparison.py).

    kind      candidate                                          truth
    right     string of 1 (right) and 0
    cosine    cosine to the float model's answer
    log_likelihood   mean log-probability of the masked tokens
    nats      nats per token of each window
    ndcg, mrr the metric of each query
    overlap   F1 of the words of each answer
    recall    0, 0.5 or 1 of each pair of an image and a text
    labels    string of label ids for each example: "0 3 3"      the right label ids, likewise
    sets      string of ascending label ids for each example     the right label ids, likewise
    scores    numbers whose order counts                         the scores of the data
    score_lists   lists of such numbers                          likewise
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

DECIMALS = 6


def right(outcomes: Iterable[object]) -> dict[str, Any]:
    """Record right/wrong outcomes of a judged candidate in the report."""
    return {"kind": "right", "candidate": "".join("1" if o else "0" for o in outcomes)}


def values(kind: str, each: Iterable[float]) -> dict[str, Any]:
    """Record one number per example of a judged candidate in the report, rounded.

    kind: name of the numbers, such as "cosine", "nats" or "overlap"
    """
    return {"kind": kind, "candidate": [round(float(value), DECIMALS) for value in each]}


def labels(
    truth: Sequence[npt.NDArray[Any]], predicted: Sequence[npt.NDArray[Any]]
) -> dict[str, Any]:
    """Record label ids, right and answered, of a judged candidate in the report.

    truth, predicted: label ids (words,) of each example
    """
    lists = [[" ".join(str(int(i)) for i in ids) for ids in part] for part in (truth, predicted)]
    return {"kind": "labels", "truth": lists[0], "candidate": lists[1]}


def sets(truth: npt.NDArray[np.bool_], predicted: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Return the record of each example's right and answered sets of labels, for report.json.

    truth, predicted: (examples, labels), True for a label in the set
    """
    ids = [[np.flatnonzero(row) for row in matrix] for matrix in (truth, predicted)]
    return {**labels(*ids), "kind": "sets", "labels": truth.shape[1]}


def scores(truth: npt.NDArray[np.float64], predicted: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Record a judged candidate's numbers whose order counts, or lists of them, unrounded, because
    rounding would make ties.

    truth, predicted: (examples,) or (examples, outputs)
    """
    kind = "scores" if truth.ndim == 1 else "score_lists"
    return {"kind": kind, "truth": truth.tolist(), "candidate": predicted.tolist()}


def read_labels(texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
    """Read the label ids (words,) of each string that `labels` wrote. Raises ValueError."""
    return [np.array([int(i) for i in text.split()], np.int64) for text in texts]


def summary(cosines: npt.NDArray[np.float64]) -> dict[str, float]:
    """Summarize for the report the cosines (examples,) of candidate and baseline: mean, least, and
    the 1st percentile."""
    return {
        "mean": float(cosines.mean()),
        "min": float(cosines.min()),
        "p01": float(np.quantile(cosines, 0.01)),
    }
