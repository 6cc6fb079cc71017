"""Choose the similarity above which a semantic cache may return another question's answer; pure.

Input: labelled pairs and the encoder's vectors. The second texts of all pairs stand for the cached
questions, the first ones are looked up. A false hit is a question that gets the answer of another:
its score is the largest similarity to any cached question that is not known to be the same. "The
same" is the transitive closure of the labels; texts that no pair compares count as different, so an
incomplete file makes the threshold too strict rather than too lax. Of questions that are the same
only one counts, because the others are not independent examples.

The threshold is the least one whose false-hit rate has an upper bound within the limit: the exact
bound of a binomial rate (Clopper and Pearson 1934, Biometrika 26, 404-413). Choosing it on the same
examples needs no correction, because hits decrease as it rises: it is too low only if the bound
failed at the one true boundary (Bates et al. 2021, Journal of the ACM 68, 43, theorem 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import InputError

Vectors = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
HALVINGS = 60  # bisection steps, down to the last bit of a double


@dataclass(frozen=True)
class QuestionPair:
    """Two labelled questions, from which the semantic cache's threshold follows.

    same: True if one answer is right for both
    line: line of the file
    """

    line: int
    text: str
    other: str
    same: bool


@dataclass(frozen=True)
class FalseHitLimit:
    """Limit of false hits of the semantic cache.

    rate: maximum share of uncached questions that get another question's answer
    confidence: probability that the limit holds
    """

    rate: float
    confidence: float


@dataclass(frozen=True)
class ChosenThreshold:
    """Threshold of `choose_threshold`, with the counts that justify it.

    threshold: cosine similarity that a hit exceeds
    entries: smallest number of cached questions that a question was compared with; a larger cache
        would have more false hits
    questions: number of independent questions, one of each group labelled the same
    false_hits, bound: number of false hits among `questions`, and the upper bound of their rate
    same: number of questions that have a right cached answer
    hits: number of questions that got their right cached answer
    """

    threshold: float
    entries: int
    questions: int
    false_hits: int
    bound: float
    same: int
    hits: int


def upper_bound(count: int, examples: int, confidence: float) -> float:
    """Return the exact upper confidence bound of the rate of false hits, a binomial (Clopper and
    Pearson 1934).

    It is the largest rate at which at most `count` of `examples` have probability 1 - confidence.
    """
    if count >= examples:
        return 1.0
    low, high = count / examples, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _binomial_cdf(count, examples, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def min_questions(terms: FalseHitLimit) -> int:
    """Return the least number of questions that can show the rate of the semantic cache if none of
    them has a false hit."""
    return math.ceil(math.log(1 - terms.confidence) / math.log1p(-terms.rate))


def choose_threshold(
    pairs: Sequence[QuestionPair],
    vectors: dict[str, Vectors],
    terms: FalseHitLimit,
    where: str = "",
) -> ChosenThreshold:
    """Choose the semantic cache's least similarity threshold whose false-hit rate is shown to be
    within the limit.

    pairs: labelled questions
    vectors: {text: normalized embedding}
    terms: limit of false hits
    where: path of the pairs, for errors

    Raises InputError for pairs that contradict each other, and for pairs that cannot show the rate:
    too few, or texts that the encoder does not distinguish.
    """
    answers = _answers(pairs, where)
    entries = list(dict.fromkeys(pair.other for pair in pairs))
    by_answer = {answers[pair.text]: pair.text for pair in reversed(pairs)}  # the first of each
    questions = list(by_answer.values())[::-1]
    alike = _matrix(questions, vectors) @ _matrix(entries, vectors).T
    known = np.array([answers[e] for e in entries])[None, :] == np.array(
        [answers[q] for q in questions]
    ).reshape(-1, 1)
    compared = (~known).sum(1)
    counted = compared > 0
    others = np.where(known, -np.inf, alike).max(1, initial=-np.inf)
    own = np.where(known, alike, -np.inf).max(1, initial=-np.inf)
    nearest = np.sort(others[counted])[::-1]
    least, number = min_questions(terms), len(nearest)
    if number < least:
        raise InputError(
            f"{number:,} questions with different answers cannot show a rate of {terms.rate:g}",
            where=where,
            accepted=f"{least:,} or more, of which none gets another's answer",
        )
    allowed = _max_false_hits(number, terms)
    size = _matrix(entries[:1], vectors).shape[1]
    error = size * float(np.finfo(np.float32).eps)  # bound of the rounding of two dot products
    threshold = float(nearest[allowed]) + error
    if threshold >= 1 - error:
        first = int(np.argmax(others))
        twin = entries[int(np.argmax(np.where(known, -np.inf, alike)[first]))]
        raise InputError(
            f"the encoder does not distinguish {allowed + 1} questions from others, such as those "
            f"of lines {_find_line(pairs, questions[first])} and {_find_line(pairs, twin)}",
            where=where,
            fix="Label them the same if one answer is right for both, or choose another encoder.",
        )
    false = int((nearest > threshold).sum())
    bound = upper_bound(false, number, terms.confidence)
    there = np.isfinite(own)
    hit = there & (own > others) & (own > threshold)
    return ChosenThreshold(
        *(threshold, int(compared[counted].min()), number, false, bound),
        *(int(there.sum()), int(hit.sum())),
    )


def _max_false_hits(examples: int, terms: FalseHitLimit) -> int:
    """Return the largest number of the cache's false hits among `examples` whose upper bound is
    within terms.rate."""
    low, high = 0, examples
    while high - low > 1:
        middle = (low + high) // 2
        if upper_bound(middle, examples, terms.confidence) <= terms.rate:
            low = middle
        else:
            high = middle
    return low


def _binomial_cdf(count: int, examples: int, rate: float) -> float:
    """Return, for the rate of false hits, P(X <= count) for X ~ Binomial(examples, rate)."""
    k = np.arange(count + 1, dtype=np.float64)
    logs: Floats = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, examples + 1)))])
    ways = logs[examples] - logs[: count + 1] - logs[examples - count : examples + 1][::-1]
    return float(np.exp(ways + k * math.log(rate) + (examples - k) * math.log1p(-rate)).sum())


def _answers(pairs: Sequence[QuestionPair], where: str) -> dict[str, int]:
    """Number, for the semantic cache, the answers that labelled questions share: {text: number},
    equal for texts labelled the same.

    Labels are transitive. Raises InputError for pairs that contradict each other.
    """
    parent = {text: text for pair in pairs for text in (pair.text, pair.other)}

    def root(text: str) -> str:
        while parent[text] != text:
            parent[text] = parent[parent[text]]
            text = parent[text]
        return text

    for pair in pairs:
        if pair.same:
            parent[root(pair.text)] = root(pair.other)
    for pair in pairs:
        if not pair.same and root(pair.text) == root(pair.other):
            raise InputError(
                "the two texts are labelled different, but are the same by other lines",
                where=f"{where}, line {pair.line}",
                accepted="pairs that do not contradict each other",
            )
    numbers: dict[str, int] = {}
    return {text: numbers.setdefault(root(text), len(numbers)) for text in parent}


def _matrix(texts: Sequence[str], vectors: dict[str, Vectors]) -> Vectors:
    return np.stack([vectors[text] for text in texts])


def _find_line(pairs: Sequence[QuestionPair], text: str) -> int:
    return next(pair.line for pair in pairs if text in (pair.text, pair.other))
