"""From logits to the next token: pure functions of arrays, in the order transformers has them.

    repetition penalty, then, when drawing: temperature, top-k, top-p, min-p, a draw

scores are (vocabulary,) float32, of one row; what a function rules out becomes -inf. Each has the
meaning of the processor of its name in transformers.generation.logits_process, tested against it.
One difference: tokens as likely as the last one that top-p keeps are kept too, where transformers
keeps whichever its sort put last.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..errors import AnswerError
from ..inputs.batch import Array
from .options import Sampling


def penalize(scores: Array, seen: Collection[int], penalty: float) -> Array:
    """Divide positive scores of tokens seen by the penalty, multiply negative ones.

    Keskar et al. 2019, arXiv 1909.05858, section 4.1.
    """
    penalized = scores.copy()
    ids = np.fromiter(seen, np.int64, len(seen))
    some = penalized[ids]
    penalized[ids] = np.where(some < 0, some * np.float32(penalty), some / np.float32(penalty))
    return penalized


def keep_top_k(scores: Array, k: int) -> Array:
    """The k highest, and whatever ties with the lowest of them."""
    if k >= scores.size:
        return scores
    least = np.partition(scores, scores.size - k)[scores.size - k]
    return np.where(scores < least, np.float32(-np.inf), scores)


def keep_top_p(scores: Array, p: float) -> Array:
    """The fewest likeliest tokens whose probabilities sum to p or more, at least one.

    Holtzman et al. 2020, arXiv 1904.09751.
    """
    ascending = np.sort(scores[np.isfinite(scores)])
    below = np.cumsum(softmax(ascending))
    first = min(int(np.searchsorted(below, 1 - p, side="right")), ascending.size - 1)
    return np.where(scores < ascending[first], np.float32(-np.inf), scores)


def keep_min_p(scores: Array, p: float) -> Array:
    """Tokens at least p times as likely as the likeliest. Nguyen et al. 2024, arXiv 2407.01082."""
    likely = softmax(scores)
    return np.where(likely < p * likely.max(), np.float32(-np.inf), scores)


def softmax(scores: Array) -> Array:
    """Probabilities, float64."""
    shifted = np.exp(scores.astype(np.float64) - float(scores.max()))
    return np.asarray(shifted / shifted.sum())


def shaped(scores: Array, sampling: Sampling) -> Array:
    """The scores that a draw reads: temperature, then whatever is ruled out."""
    with np.errstate(over="ignore"):  # at worst -inf: the likeliest alone is left
        logits: Array = (scores - scores.max()) / np.float32(sampling.temperature)
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


def draw(scores: Array, generator: np.random.Generator) -> int:
    """A token with the probability of its score: one uniform number, looked up in the sum."""
    upto = np.cumsum(softmax(scores))
    at = np.searchsorted(upto, generator.random() * upto[-1], side="right")
    return int(min(at, np.flatnonzero(np.isfinite(scores))[-1]))


def choose(
    scores: Array, seen: Collection[int], sampling: Sampling, generator: np.random.Generator
) -> int:
    """The next token of one row. seen: ids of its prompt and of what followed.

    Raises AnswerError for scores that hold NaN, or of which none is the highest.
    """
    if np.isnan(scores).any() or not np.isfinite(scores.max()):
        raise AnswerError(
            "the scores of the next token hold NaN, or nothing finite",
            where="output logits",
        )
    if sampling.repetition_penalty != 1:
        scores = penalize(scores, seen, sampling.repetition_penalty)
    if not sampling.do_sample:
        return int(scores.argmax())
    return draw(shaped(scores, sampling), generator)
