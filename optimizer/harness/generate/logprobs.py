"""How likely tokens are by the model itself, before temperature or any other option."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..inputs.batch import Array


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities. chosen: of the token that was. top: (token, logarithm)
    of the likeliest, likeliest first; of equal ones the lower id first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


def logprobs(scores: Array, token: int, count: int) -> Logprobs:
    """Of a token and of the `count` likeliest. scores (vocabulary,) float32."""
    wide = scores.astype(np.float64)
    highest = wide.max()
    total = float(highest + np.log(np.exp(wide - highest).sum()))
    top = tuple((i, float(wide[i] - total)) for i in _likeliest(scores, count))
    return Logprobs(float(wide[token] - total), top)


def _likeliest(scores: Array, count: int) -> list[int]:
    if not count:
        return []
    count = min(count, scores.size)
    least = np.partition(scores, scores.size - count)[scores.size - count]
    ids = np.flatnonzero(scores >= least)  # in order, all that tie with the last among them
    ranked: Array = ids[np.argsort(-scores[ids], kind="stable")]
    return [int(i) for i in ranked[:count]]
