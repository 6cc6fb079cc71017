"""Test if answers depend on the labels: permutation tests against chance.

Under the null hypothesis labels and answers are independent, so the labels of the rows may be
permuted: a permutation test, exact at any number of rows and for labels of any frequencies (Pitman
1937; as a Monte Carlo test with p = (1 + draws as high) / (1 + draws), Phipson and Smyth 2010,
Stat. Appl. Genet. Mol. Biol. 9, 39). A test against the best constant answer would reject a good
model of rare classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from optimizer.data.answers import SCORES, select_usable
from optimizer.validate.quality.metrics import Ranking
from optimizer.validate.quality.significance import POWER, Floats

Labels = npt.NDArray[Any]
Booleans = npt.NDArray[np.bool_]
SPANS = 300  # questions whose answers are compared with those of all others
FINER = 50  # draws / (1 / alpha)
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Agreement:
    """Agreement of answers with labels.

    value: agreement of the answers
    best: agreement of right answers
    draw: (agreement of the answers, of right answers) after a random permutation of the labels
    """

    value: float
    best: float
    draw: Callable[[np.random.Generator], tuple[float, float]]


@dataclass(frozen=True)
class Chance:
    """Result of a test against chance.

    expected: mean agreement under chance
    reach: agreement that is exceeded under chance with probability alpha
    p: probability under chance of an agreement as high as `value`
    above: True where p is at most alpha
    enough: True where answers half way from chance to right ones would be above chance on these
        rows with probability POWER; without it a value within chance is reported and not refused
    """

    value: float
    expected: float
    reach: float
    p: float
    above: bool
    enough: bool


def compare_with_chance(agreement: Agreement, confidence: float, seed: int = 0) -> Chance:
    """Test if the agreement of answers with labels is higher than under chance.

    confidence: 1 - alpha of this one-sided test
    seed: seed of the permutations
    """
    alpha = 1 - confidence
    generator = np.random.default_rng(seed)
    count = math.ceil(FINER / alpha) - 1
    draws, right = np.array([agreement.draw(generator) for _ in range(count)]).T
    p = (1 + int((draws >= agreement.value - 1e-12).sum())) / (1 + count)
    z = _NORMAL.inv_cdf(confidence) + _NORMAL.inv_cdf(POWER)
    half = (agreement.best - float(right.mean())) / 2
    return Chance(
        value=agreement.value,
        expected=float(draws.mean()),
        reach=float(np.quantile(draws, confidence)),
        p=p,
        above=p <= alpha,
        enough=half > z * float(right.std()) + 1e-12,
    )


def matches(truth: Labels, predicted: Labels) -> Agreement:
    """Measure the share of rows whose answer is the label.

    truth, predicted: label ids (rows,)
    """

    def draw(generator: np.random.Generator) -> tuple[float, float]:
        shuffled = generator.permutation(truth)
        return float((shuffled == predicted).mean()), float((shuffled == truth).mean())

    return Agreement(float((truth == predicted).mean()), 1.0, draw)


def agree_with_nearest(labels: Labels, nearest: Labels) -> Agreement:
    """Measure the share of rows whose nearest row has the same label.

    labels: label ids (rows,)
    nearest: number of each row's nearest row (rows,)
    """

    def draw(generator: np.random.Generator) -> tuple[float, float]:
        shuffled = generator.permutation(labels)
        same = float((shuffled[nearest] == shuffled).mean())
        return same, float((shuffled == labels).mean())

    return Agreement(float((labels[nearest] == labels).mean()), 1.0, draw)


def rank_correlation(values: Floats, scores: Floats) -> Agreement:
    """Measure Spearman's correlation, the mean over outputs where there are several; 0 where all
    values are equal.

    values, scores: (rows,) or (rows, outputs)
    """
    x, y = (
        np.stack([_standard_ranks(c) for c in part.reshape(len(part), -1).T], 1)
        for part in (values, scores)
    )

    def mean(a: Floats, b: Floats) -> float:
        return float((a * b).sum(0).mean())

    def draw(generator: np.random.Generator) -> tuple[float, float]:
        shuffled = generator.permutation(y)
        return mean(x, shuffled), mean(y, shuffled)

    return Agreement(mean(x, y), mean(y, y), draw)


def agree_on_sets(truth: Booleans, predicted: Booleans) -> Agreement:
    """Measure the micro F1 of sets of labels.

    truth, predicted: (rows, labels), True for a label in the set
    """
    total = max(int(truth.sum() + predicted.sum()), 1)

    def draw(generator: np.random.Generator) -> tuple[float, float]:
        shuffled = generator.permutation(truth)
        right = 2 * int((shuffled & truth).sum()) / max(2 * int(truth.sum()), 1)
        return 2 * int((shuffled & predicted).sum()) / total, right

    return Agreement(2 * int((truth & predicted).sum()) / total, 1.0, draw)


def agree_on_ranking(ranking: Ranking, scores: Floats) -> Agreement:
    """Measure the mean over queries of the ranking's metric. Under chance, relevance is permuted
    within each query.

    scores: score of each document (documents,)
    """
    weights, right = ranking.weights(scores), ranking.weights(ranking.relevance)

    def draw(generator: np.random.Generator) -> tuple[float, float]:
        order = np.lexsort((generator.random(len(weights)), ranking.queries))
        shuffled = ranking.relevance[order]
        each = (ranking.values(w, shuffled) for w in (weights, right))
        answered, best = (float(values.mean()) for values in each)
        return answered, best

    value, best = (float(ranking.values(w).mean()) for w in (weights, right))
    return Agreement(value, best, draw)


def agree_on_spans(
    name: str, right: Sequence[tuple[str, ...]], predicted: Sequence[str]
) -> Agreement:
    """Measure exact match or F1 of predicted answers to the first SPANS questions. Under chance,
    the right answers are permuted among the questions.

    name: exact_match or f1
    right: right answers of each question
    predicted: one answer per question
    """
    right, predicted = right[:SPANS], predicted[:SPANS]
    best = [select_usable(one)[0] for one in right]
    each, ideal = (
        np.array([[SCORES[name](answer, one) for one in right] for answer in answers])
        for answers in (predicted, best)
    )
    rows = np.arange(len(right))

    def draw(generator: np.random.Generator) -> tuple[float, float]:
        shuffled = generator.permutation(len(right))
        return float(each[rows, shuffled].mean()), float(ideal[rows, shuffled].mean())

    return Agreement(float(np.diag(each).mean()), 1.0, draw)


def _standard_ranks(values: Floats) -> Floats:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[group]
    ranks = ranks - ranks.mean()
    return np.asarray(ranks / max(float(np.linalg.norm(ranks)), 1e-300), np.float64)


def agree_on_words(truth: Sequence[Labels], predicted: Sequence[Labels]) -> Agreement:
    """Measure the share of words whose answer is the label; texts are the independent units.

    truth, predicted: label ids (words,) of each text

    Under chance the excess of each text, its right words less those expected from the labels'
    frequencies, has a random sign. Words of one text depend on each other, and texts of different
    lengths cannot be permuted.
    """
    labels, counts = np.unique(np.concatenate(list(truth)), return_counts=True)
    share = {int(k): float(c) / float(counts.sum()) for k, c in zip(labels, counts, strict=True)}

    def beyond(answers: Sequence[Labels]) -> Floats:
        pairs = zip(truth, answers, strict=True)
        return np.array(
            [(t == a).sum() - sum(share.get(int(k), 0.0) for k in a) for t, a in pairs], np.float64
        )

    words = float(counts.sum())
    value = sum(float((t == a).sum()) for t, a in zip(truth, predicted, strict=True)) / words
    gained, most = beyond(predicted) / words, beyond(truth) / words

    def draw(generator: np.random.Generator) -> tuple[float, float]:
        sign = generator.choice((-1.0, 1.0), len(gained))
        return value - gained.sum() + float(sign @ gained), 1 - most.sum() + float(sign @ most)

    return Agreement(value, 1.0, draw)


def find_exchange(
    truth: Sequence[Labels], predicted: Sequence[Labels], labels: int, confidence: float
) -> tuple[int, ...] | None:
    """Find an exchange of labels with which the answers are better than chance; else None.

    Two labels have one exchange. Of more labels the best exchange is chosen on every second text
    and judged on the others, so that the choice does not bias the test.

    truth, predicted: label ids (words,) of each text; -1 in `predicted`: no label
    labels: number of labels
    """
    every = slice(None) if labels == 2 else slice(1, None, 2)
    reading = (1, 0) if labels == 2 else find_best_reading(truth[::2], predicted[::2], labels)
    if reading == tuple(range(labels)) or not len(truth[every]):
        return None
    read = [np.append(reading, -1)[t] for t in predicted[every]]
    return (
        reading
        if compare_with_chance(agree_on_labels(truth[every], read), confidence).above
        else None
    )


def find_better_reading(
    truth: Sequence[Labels], predicted: Sequence[Labels], labels: int, confidence: float
) -> tuple[int, ...] | None:
    """Find an exchange with which more answers are right than without; else None. It is chosen by
    find_best_reading on every second text and tested on the others, by a sign test over the texts
    whose number of right answers it changes.

    truth, predicted: label ids (words,) of each text; -1 in `predicted`: no label
    labels: number of labels
    confidence: 1 - alpha of the test
    """
    reading = find_best_reading(truth[::2], predicted[::2], labels)
    changes = []
    for t, a in zip(truth[1::2], predicted[1::2], strict=True):
        changes.append(int((np.append(reading, -1)[a] == t).sum() - (a == t).sum()))
    won, lost = sum(c > 0 for c in changes), sum(c < 0 for c in changes)
    ways = sum(math.comb(won + lost, k) for k in range(won, won + lost + 1))
    surprising = ways <= (1 - confidence) * 2 ** (won + lost)
    return reading if won and surprising else None


def agree_on_labels(truth: Sequence[Labels], predicted: Sequence[Labels]) -> Agreement:
    """Measure agreement by `matches` where every text has one label, else by agree_on_words."""
    if all(len(t) == 1 for t in truth):
        return matches(np.concatenate(list(truth)), np.concatenate(list(predicted)))
    return agree_on_words(truth, predicted)


def find_best_reading(
    truth: Sequence[Labels], predicted: Sequence[Labels], labels: int
) -> tuple[int, ...]:
    """Find the exchange of label ids with which most answers are right: reading[answer] = label.

    truth, predicted: label ids (words,) of each text; -1 in `predicted`: no label
    labels: number of labels
    """
    true, flat = np.concatenate(list(truth)), np.concatenate(list(predicted))
    confusion = np.zeros((labels, labels))
    known = flat >= 0
    np.add.at(confusion, (flat[known], true[known]), 1)
    # the identity wins ties
    return tuple(assign(-confusion - np.eye(labels) / (2 * labels)))


def assign(cost: Floats) -> list[int]:
    """Assign answered labels to right ones, a column to each row of a square matrix so that the
    total cost is least, and return the columns. Algorithm of Kuhn and Munkres by shortest
    augmenting paths (Jonker and Volgenant 1987)."""
    n = len(cost)
    u, v = np.zeros(n + 1), np.zeros(n + 1)
    row_of = np.zeros(n + 1, np.int64)  # row of each column, both from 1; 0: none
    for row in range(1, n + 1):
        row_of[0], column = row, 0
        least, before = np.full(n + 1, np.inf), np.zeros(n + 1, np.int64)
        done = np.zeros(n + 1, np.bool_)
        while row_of[column]:
            done[column] = True
            reduced = cost[row_of[column] - 1] - u[row_of[column]] - v[1:]
            nearer = ~done[1:] & (reduced < least[1:])
            least[1:][nearer], before[1:][nearer] = reduced[nearer], column
            following = 1 + int(np.where(done[1:], np.inf, least[1:]).argmin())
            step = least[following]
            u[row_of[done]] += step
            v[done] -= step
            least[~done] -= step
            column = following
        while column:
            row_of[column] = row_of[before[column]]
            column = int(before[column])
    return [int(c) for c in np.argsort(row_of[1:])]
