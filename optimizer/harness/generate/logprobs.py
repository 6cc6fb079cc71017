"""Log probabilities of tokens by the model, before temperature and other options."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..inputs.batch import Array


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of token probabilities.

    chosen: log probability of the chosen token.
    top: (token, log probability) of the most likely tokens in descending order, ties by id.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


def logprobs(scores: Array, token: int, count: int) -> Logprobs:
    """Return the log probabilities of a token and of the `count` most likely tokens.

    scores: logits (vocabulary,), float32.
    """
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
    ids = np.flatnonzero(scores >= least)  # ascending ids, with all ties of the last
    ranked: Array = ids[np.argsort(-scores[ids], kind="stable")]
    return [int(i) for i in ranked[:count]]
