"""How alike two questions must be so that one may have the other's answer; pure.

From labelled pairs, with the encoder's own vectors. The second texts of all pairs stand for what a
cache holds, the first ones are asked of it. Asked is whether a question whose answer is not there
would be given another's: the largest similarity to any entry that is not known to be the same,
where "the same" is what pairs say, and what follows from several. Two texts that no pair compares
count as different, so that a file in which they are not says too much rather than too little. Of
questions that are the same one counts: the others are no examples of their own.

The threshold is the least one at which the false-hit rate is bounded as asked, by the exact upper
bound of a binomial rate (Clopper and Pearson 1934, Biometrika 26, 404-413). To have chosen it on
the same examples costs nothing: fewer are hit as it rises, so that it is too low only if the bound
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
HALVINGS = 60  # of an interval: to the last bit of a double


@dataclass(frozen=True)
class Pair:
    """same: whether one answer is right for both texts. line: of the file."""

    line: int
    text: str
    other: str
    same: bool


@dataclass(frozen=True)
class Terms:
    """rate: of questions without an answer of their own, those that may be given another's, at
    most; with this confidence."""

    rate: float
    confidence: float


@dataclass(frozen=True)
class Chosen:
    """threshold: a hit has a larger similarity. entries: that a question was compared with, at
    least: with more, another's is found more often. questions: that count; false_hits of them; and
    bound, of the rate. same: questions whose answer was there; hits: of those, that were given it.
    """

    threshold: float
    entries: int
    questions: int
    false_hits: int
    bound: float
    same: int
    hits: int


def upper_bound(count: int, examples: int, confidence: float) -> float:
    """The largest rate that has so few, or fewer, of so many examples with a probability of 1 -
    confidence."""
    if count >= examples:
        return 1.0
    low, high = count / examples, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _at_most(count, examples, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def needed(terms: Terms) -> int:
    """Questions that show such a rate where none of them has a false hit."""
    return math.ceil(math.log(1 - terms.confidence) / math.log1p(-terms.rate))


def chosen(
    pairs: Sequence[Pair], vectors: dict[str, Vectors], terms: Terms, where: str = ""
) -> Chosen:
    """See the module. vectors: of every text, of length 1. Raises InputError for pairs that
    contradict each other, and for too few, or too unlike the encoder's idea, to show such a
    rate."""
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
    least, number = needed(terms), len(nearest)
    if number < least:
        raise InputError(
            f"{number:,} questions of different answers cannot show a rate of {terms.rate:g}",
            where=where,
            accepted=f"from {least:,}, where none of them is given another's answer",
        )
    allowed = _most(number, terms)
    size = _matrix(entries[:1], vectors).shape[1]
    error = size * float(np.finfo(np.float32).eps)  # of two sums of such products, either way
    threshold = float(nearest[allowed]) + error
    if threshold >= 1 - error:
        first = int(np.argmax(others))
        twin = entries[int(np.argmax(np.where(known, -np.inf, alike)[first]))]
        raise InputError(
            f"the encoder does not tell {allowed + 1} questions from others, such as those of "
            f"lines {_line(pairs, questions[first])} and {_line(pairs, twin)}",
            where=where,
            fix="Label them the same if one answer is right for both; or take another encoder.",
        )
    false = int((nearest > threshold).sum())
    bound = upper_bound(false, number, terms.confidence)
    there = np.isfinite(own)
    hit = there & (own > others) & (own > threshold)
    return Chosen(
        *(threshold, int(compared[counted].min()), number, false, bound),
        *(int(there.sum()), int(hit.sum())),
    )


def _most(examples: int, terms: Terms) -> int:
    """The largest number of false hits whose bound is the rate at most."""
    low, high = 0, examples
    while high - low > 1:
        middle = (low + high) // 2
        if upper_bound(middle, examples, terms.confidence) <= terms.rate:
            low = middle
        else:
            high = middle
    return low


def _at_most(count: int, examples: int, rate: float) -> float:
    """P(X <= count) of a binomial X."""
    k = np.arange(count + 1, dtype=np.float64)
    logs: Floats = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, examples + 1)))])
    ways = logs[examples] - logs[: count + 1] - logs[examples - count : examples + 1][::-1]
    return float(np.exp(ways + k * math.log(rate) + (examples - k) * math.log1p(-rate)).sum())


def _answers(pairs: Sequence[Pair], where: str) -> dict[str, int]:
    """A number for each text, alike for those that are the same. Raises InputError."""
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
                "two texts are said to be different that are the same by other lines",
                where=f"{where}, line {pair.line}",
                accepted="pairs that do not contradict each other",
            )
    numbers: dict[str, int] = {}
    return {text: numbers.setdefault(root(text), len(numbers)) for text in parent}


def _matrix(texts: Sequence[str], vectors: dict[str, Vectors]) -> Vectors:
    return np.stack([vectors[text] for text in texts])


def _line(pairs: Sequence[Pair], text: str) -> int:
    return next(pair.line for pair in pairs if text in (pair.text, pair.other))
