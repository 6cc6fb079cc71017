"""Choose the next token from logits: pure functions of arrays, in the order of transformers.

    repetition penalty; if sampling, then temperature, top-k, top-p, min-p and a draw

scores are (vocabulary,) float32 of one row; excluded tokens become -inf. Each function equals the
processor of its name in transformers.generation.logits_process and is tested against it. One
difference: top-p keeps all tokens tied with the last one; transformers keeps an arbitrary one.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..errors import AnswerError
from ..inputs.batch import Array
from .options import Sampling


def penalize(scores: Array, seen: Collection[int], penalty: float) -> Array:
    """Divide positive scores of tokens already in the text by the penalty, multiply negative ones
    by it.

    Keskar et al. 2019, arXiv 1909.05858, section 4.1.
    """
    penalized = scores.copy()
    ids = np.fromiter(seen, np.int64, len(seen))
    some = penalized[ids]
    penalized[ids] = np.where(some < 0, some * np.float32(penalty), some / np.float32(penalty))
    return penalized


def keep_top_k(scores: Array, k: int) -> Array:
    """Keep the k highest next-token scores, and all scores equal to the k-th highest."""
    if k >= scores.size:
        return scores
    least = np.partition(scores, scores.size - k)[scores.size - k]
    return np.where(scores < least, np.float32(-np.inf), scores)


def keep_top_p(scores: Array, p: float) -> Array:
    """Keep the smallest set of most likely next tokens with a total probability of at least p.

    Holtzman et al. 2020, arXiv 1904.09751.
    """
    ascending = np.sort(scores[np.isfinite(scores)])
    below = np.cumsum(softmax(ascending))
    first = min(int(np.searchsorted(below, 1 - p, side="right")), ascending.size - 1)
    return np.where(scores < ascending[first], np.float32(-np.inf), scores)


def keep_min_p(scores: Array, p: float) -> Array:
    """Keep next tokens with at least p times the highest probability.

    Nguyen et al. 2024, arXiv 2407.01082.
    """
    likely = softmax(scores)
    return np.where(likely < p * likely.max(), np.float32(-np.inf), scores)


def softmax(scores: Array) -> Array:
    """Compute the probabilities of next tokens from their scores, in float64."""
    shifted = np.exp(scores.astype(np.float64) - float(scores.max()))
    return np.asarray(shifted / shifted.sum())


def shape_scores(scores: Array, sampling: Sampling) -> Array:
    """Return next-token scores after temperature, top-k, top-p and min-p."""
    with np.errstate(over="ignore"):  # -inf at worst, which leaves the most likely token
        logits: Array = (scores - scores.max()) / np.float32(sampling.temperature)
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


def draw(scores: Array, generator: np.random.Generator) -> int:
    """Draw the next token's id with probability softmax(scores), by inverse transform sampling."""
    upto = np.cumsum(softmax(scores))
    at = np.searchsorted(upto, generator.random() * upto[-1], side="right")
    return int(min(at, np.flatnonzero(np.isfinite(scores))[-1]))


def choose(
    scores: Array, seen: Collection[int], sampling: Sampling, generator: np.random.Generator
) -> int:
    """Return the id of the next token of one row.

    seen: ids of the prompt and of the generated tokens.
    Raises AnswerError if scores contain NaN or have no finite maximum.
    """
    if np.isnan(scores).any() or not np.isfinite(scores.max()):
        raise AnswerError(
            "the scores of the next token contain NaN or have no finite maximum",
            where="output logits",
        )
    if sampling.repetition_penalty != 1:
        scores = penalize(scores, seen, sampling.repetition_penalty)
    if not sampling.do_sample:
        return int(scores.argmax())
    return draw(shape_scores(scores, sampling), generator)
