"""Do answers know anything of the labels? Pure functions.

Under the null hypothesis labels and answers have nothing to do with each other, so the labels of
the rows may be exchanged among them: a permutation test, exact at any number of rows and for labels
of any frequencies (Pitman 1937; as a Monte Carlo test with p = (1 + draws as high) / (1 + draws),
Phipson and Smyth 2010, Stat. Appl. Genet. Mol. Biol. 9, 39). A test against the best constant
answer would call an honest model of rare classes one that knows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from optimizer.validate.quality.significance import POWER, Floats

Labels = npt.NDArray[Any]
FINER = 50  # draws: so many times more than alpha needs to be seen at all
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Agreement:
    """value: of the answers with the labels; best: of right answers. draw: both when the labels are
    exchanged among the rows at random."""

    value: float
    best: float
    draw: Callable[[np.random.Generator], tuple[float, float]]


@dataclass(frozen=True)
class Chance:
    """expected: the value of answers that know nothing; reach: what they exceed with probability
    alpha. p: of a value as high as `value`. enough: whether answers half of the way from chance to
    right ones would be told from chance with probability POWER on these rows; it decides only
    whether a value within chance is refused or said to be undecided."""

    value: float
    expected: float
    reach: float
    p: float
    above: bool
    enough: bool


def against_chance(agreement: Agreement, confidence: float, seed: int = 0) -> Chance:
    """Is the value higher than answers that know nothing reach, at `confidence` (one side)?"""
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
    """The share of rows whose answer is the label; both (rows,)."""

    def draw(generator: np.random.Generator) -> tuple[float, float]:
        shuffled = generator.permutation(truth)
        return float((shuffled == predicted).mean()), float((shuffled == truth).mean())

    return Agreement(float((truth == predicted).mean()), 1.0, draw)


def same_as_nearest(labels: Labels, nearest: Labels) -> Agreement:
    """The share of rows with the label of their nearest row; nearest: row numbers (rows,)."""

    def draw(generator: np.random.Generator) -> tuple[float, float]:
        shuffled = generator.permutation(labels)
        same = float((shuffled[nearest] == shuffled).mean())
        return same, float((shuffled == labels).mean())

    return Agreement(float((labels[nearest] == labels).mean()), 1.0, draw)


def rank_correlation(values: Floats, scores: Floats) -> Agreement:
    """Spearman's; 0 where all values are one."""
    x, y = _standard_ranks(values), _standard_ranks(scores)

    def draw(generator: np.random.Generator) -> tuple[float, float]:
        shuffled = generator.permutation(y)
        return float(x @ shuffled), float(y @ shuffled)

    return Agreement(float(x @ y), float(y @ y), draw)


def _standard_ranks(values: Floats) -> Floats:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[group]
    ranks = ranks - ranks.mean()
    return np.asarray(ranks / max(float(np.linalg.norm(ranks)), 1e-300), np.float64)


def word_matches(truth: Sequence[Labels], predicted: Sequence[Labels]) -> Agreement:
    """The share of words whose answer is the label, texts being the independent units.

    A text's words above what their answers get from the labels' frequencies change sign at random:
    words of one text depend on each other, and texts of different lengths cannot be exchanged.
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


def exchanged(
    truth: Sequence[Labels], predicted: Sequence[Labels], labels: int, confidence: float
) -> tuple[int, ...] | None:
    """What each answer should be read as, where the answers then do better than chance, else None.

    truth, predicted: the label ids (words,) of each text, one where a text has one label; ids of
    `labels` labels, -1 in `predicted` for none. Of two labels there is one other reading; of
    more it is chosen on every second text and judged on the others, so that choosing the best of
    many does not count.
    """
    every = slice(None) if labels == 2 else slice(1, None, 2)
    reading = (1, 0) if labels == 2 else best_reading(truth[::2], predicted[::2], labels)
    if reading == tuple(range(labels)) or not len(truth[every]):
        return None
    read = [np.append(reading, -1)[t] for t in predicted[every]]
    return reading if against_chance(word_or_row(truth[every], read), confidence).above else None


def better_read(
    truth: Sequence[Labels], predicted: Sequence[Labels], labels: int, confidence: float
) -> tuple[int, ...] | None:
    """As `exchanged`, where the other reading is right more often than the given one: a sign test
    over the texts of the second half that the two readings change."""
    reading = best_reading(truth[::2], predicted[::2], labels)
    changes = []
    for t, a in zip(truth[1::2], predicted[1::2], strict=True):
        changes.append(int((np.append(reading, -1)[a] == t).sum() - (a == t).sum()))
    won, lost = sum(c > 0 for c in changes), sum(c < 0 for c in changes)
    ways = sum(math.comb(won + lost, k) for k in range(won, won + lost + 1))
    surprising = ways <= (1 - confidence) * 2 ** (won + lost)
    return reading if won and surprising else None


def word_or_row(truth: Sequence[Labels], predicted: Sequence[Labels]) -> Agreement:
    """`matches` where every text has one label, else `word_matches`."""
    if all(len(t) == 1 for t in truth):
        return matches(np.concatenate(list(truth)), np.concatenate(list(predicted)))
    return word_matches(truth, predicted)


def best_reading(
    truth: Sequence[Labels], predicted: Sequence[Labels], labels: int
) -> tuple[int, ...]:
    """The exchange of label ids under which most answers are right: reading[answer] = label."""
    true, flat = np.concatenate(list(truth)), np.concatenate(list(predicted))
    confusion = np.zeros((labels, labels))
    known = flat >= 0
    np.add.at(confusion, (flat[known], true[known]), 1)
    # of equally good ones the given reading: no label is called exchanged without a reason
    return tuple(assign(-confusion - np.eye(labels) / (2 * labels)))


def assign(cost: Floats) -> list[int]:
    """The column of each row that makes the total cost least; cost is square.

    Kuhn and Munkres by shortest augmenting paths (Jonker and Volgenant 1987).
    """
    n = len(cost)
    u, v = np.zeros(n + 1), np.zeros(n + 1)
    row_of = np.zeros(n + 1, np.int64)  # of each column, from 1; 0 is none
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
