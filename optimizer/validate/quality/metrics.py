"""Metrics of two systems on the same examples, as functions of the examples' weights.

`decide` judges a Metric against a margin: the candidate against its float model (quality.py), and a
new bundle against the one in production (publish/environments/comparison.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from optimizer.data.answers import SCORES
from optimizer.validate.quality import per_example, significance
from optimizer.validate.quality.significance import Decision, Floats

Value = Callable[[Floats], Floats]
Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[Any]


@dataclass(frozen=True)
class Metric:
    """One metric of two systems.

    baseline, candidate: weights (rows, examples) -> value (rows,)
    outcomes: right or wrong per example for both systems, where the metric is a share of right ones
    imagined: (baseline, candidate) with a few added examples that only the baseline gets right,
        then with some that only the candidate gets right; for metrics of rare disagreements (see
        significance.decide_by_bootstrap)
    each: record of the candidate per example (per_example.py)
    queries: Ranking of the rows where an example is a query with its documents
    """

    baseline: Value
    candidate: Value
    outcomes: tuple[Booleans, Booleans] | None = None
    imagined: tuple[tuple[Value, Value], tuple[Value, Value]] | None = None
    each: Mapping[str, Any] | None = None
    queries: Ranking | None = None


def decide(metric: Metric, examples: int, margin: float, confidence: float) -> Decision:
    """Decide if the candidate is worse than the baseline by less than the margin: by the exact
    paired test where the metric has right/wrong outcomes, else by the bootstrap.

    examples: number of examples
    margin: largest accepted drop
    confidence: 1 - alpha of the test
    """
    if metric.outcomes is not None:
        return significance.decide_by_outcomes(*metric.outcomes, margin, confidence)
    return significance.decide_by_bootstrap(
        _drop(metric.baseline, metric.candidate),
        examples,
        margin,
        confidence,
        imagined=metric.imagined and (_drop(*metric.imagined[0]), _drop(*metric.imagined[1])),
    )


def _drop(baseline: Value, candidate: Value) -> Value:
    return lambda weights: baseline(weights) - candidate(weights)


def shares(baseline: Booleans, candidate: Booleans) -> Metric:
    """Metric: share of right answers.

    baseline, candidate: (examples,), True where the answer is right
    """
    a, b = baseline.astype(np.float64), candidate.astype(np.float64)
    return Metric(
        lambda w: w @ a / w.sum(1),
        lambda w: w @ b / w.sum(1),
        outcomes=(baseline, candidate),
        each=per_example.right(candidate),
    )


def mean_cosine(cosines: Floats) -> Metric:
    """Metric: mean of the candidate's cosines to the baseline, whose own value is 1.

    cosines: (examples,)
    """
    return Metric(
        lambda w: np.ones(len(w)),
        lambda w: w @ cosines / w.sum(1),
        each=per_example.values("cosine", cosines),
    )


def mean_log_likelihood(baseline: Floats, candidate: Floats) -> Metric:
    """Metric: mean log-probability, in nats.

    baseline, candidate: (examples,)
    """
    return Metric(
        lambda w: w @ baseline / w.sum(1),
        lambda w: w @ candidate / w.sum(1),
        each=per_example.values("log_likelihood", candidate),
    )


def rank_correlation(baseline: Floats, candidate: Floats, scores: Floats) -> Metric:
    """Metric: Spearman's correlation of a system's values with the scores, the mean over outputs
    where there are several.

    baseline, candidate, scores: (examples,) or (examples, outputs)
    """
    return Metric(
        _mean_spearman(baseline, scores),
        _mean_spearman(candidate, scores),
        each=per_example.scores(scores, candidate),
    )


def _mean_spearman(values: Floats, scores: Floats) -> Value:
    columns = [c.reshape(len(c), -1).T for c in (values, scores)]
    each = [spearman(v, s) for v, s in zip(*columns, strict=True)]
    return lambda weights: np.asarray(np.mean([one(weights) for one in each], 0), np.float64)


def spearman(values: Floats, scores: Floats) -> Value:
    """Return the function weights (rows, n) -> Pearson's correlation (rows,) of the weighted
    examples' mid-ranks.

    values, scores: (n,)
    """
    ranks_of_values, ranks_of_scores = _weighted_ranks(values), _weighted_ranks(scores)

    def correlation(weights: Floats) -> Floats:
        total = weights.sum(1, keepdims=True)
        x, y = ranks_of_values(weights), ranks_of_scores(weights)
        x = x - (weights * x).sum(1, keepdims=True) / total
        y = y - (weights * y).sum(1, keepdims=True) / total
        across = (weights * x * y).sum(1)
        spread = np.sqrt((weights * x * x).sum(1) * (weights * y * y).sum(1))
        return np.asarray(across / np.where(spread > 0, spread, np.inf), np.float64)

    return correlation


def _weighted_ranks(values: Floats) -> Value:
    """Return the function weights (rows, n) -> mid-rank (rows, n) of each example if it is repeated
    `weight` times; equal values share a rank.

    values: (n,)
    """
    unique, group = np.unique(values, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(len(unique)))

    def ranks(weights: Floats) -> Floats:
        sizes = np.add.reduceat(weights[:, order], starts, axis=1)
        before = np.cumsum(sizes, axis=1) - sizes
        return np.asarray((before + (sizes + 1) / 2)[:, group], np.float64)

    return ranks


RANKING = ("ndcg", "mrr")
"""Metrics whose examples are queries, each with its documents."""
RANKED = 10  # documents of a query that nDCG counts


@dataclass(frozen=True)
class Ranking:
    """The documents of all queries that a metric of RANKING judges, those of a query side by side.

    ndcg: nDCG@10 with linear gains and logarithmic discounts (Järvelin and Kekäläinen 2002)
    mrr: reciprocal rank of the first relevant document

    metric: ndcg or mrr
    rows: row number of each document
    queries: number of each document's query, ascending from 0
    relevance: relevance of each document, 0 or more
    left_out: number of queries for which all orders of their documents have one value
    """

    metric: str
    rows: Integers
    queries: Integers
    relevance: Floats
    left_out: int = 0

    @cached_property
    def starts(self) -> Integers:
        """Place of the first document of each query."""
        return np.flatnonzero(np.diff(self.queries, prepend=-1))

    def weights(self, scores: Floats) -> Floats:
        """Compute the factor of each document in the metric: its discount (ndcg) or reciprocal rank
        (mrr). Documents of equal scores get the mean discount, or that of the middle rank.

        scores: scores (documents,) by which documents are ordered
        """
        order = np.lexsort((-scores, self.queries))
        ranked, place = scores[order], np.arange(len(order)) - self.starts[self.queries]
        new = (place == 0) | (np.diff(ranked, prepend=np.nan) != 0)
        tie = np.cumsum(new) - 1
        first, size = place[new][tie], np.bincount(tie)[tie]
        if self.metric == "mrr":
            weights = 1 / (first + (size + 1) / 2)
        else:
            discounts = 1 / np.log2(np.arange(2, len(order) + 2))
            discounts[RANKED:] = 0
            total = np.concatenate([[0.0], np.cumsum(discounts)])
            weights = (total[first + size] - total[first]) / size
        result = np.empty(len(order))
        result[order] = weights
        return result

    @cached_property
    def _ideal(self) -> Floats:
        """DCG of the best order of each query (queries,); 1 for a query without a relevant
        document."""
        best = np.add.reduceat(self.relevance * self.weights(self.relevance), self.starts)
        return np.where(best > 0, best, 1.0)

    def values(self, weights: Floats, relevance: Floats | None = None) -> Floats:
        """Compute the metric of each query (queries,).

        weights: result of `weights`
        relevance: relevance of each document; None: self.relevance. Chance passes permutations of
            it
        """
        relevance = self.relevance if relevance is None else relevance
        if self.metric == "mrr":
            return np.maximum.reduceat(np.where(relevance > 0, weights, 0.0), self.starts)
        return np.asarray(np.add.reduceat(relevance * weights, self.starts) / self._ideal)

    @property
    def worst(self) -> Floats:
        """Compute the metric of each query (queries,) in the worst order of its documents."""
        return self.values(self.weights(-self.relevance))


def rank_queries(metric: str, queries: Sequence[str], relevance: Floats) -> Ranking:
    """Group rows by query. Queries for which every order of the documents has the same value are
    left out: those with one document, and those whose documents are all equally relevant.

    metric: ndcg or mrr
    queries: query of each row
    relevance: relevance of each row (rows,)
    """
    _, numbers = np.unique(np.array(queries, object), return_inverse=True)
    rows = np.argsort(numbers, kind="stable")
    whole = Ranking(metric, rows, numbers[rows], relevance[rows])
    best = whole.values(whole.weights(whole.relevance))
    judged = best > whole.worst + 1e-12
    keep = judged[whole.queries]
    _, kept = np.unique(whole.queries[keep], return_inverse=True)
    return Ranking(metric, rows[keep], kept, whole.relevance[keep], int((~judged).sum()))


def ranking_metric(
    ranking: Ranking, baseline: Floats, candidate: Floats, confidence: float = 0.95
) -> Metric:
    """Compare two models by a ranking: the mean over queries of its metric, one score per row (a
    query with one document).

    baseline, candidate: scores (rows,)

    The pseudo-observations (Metric.imagined), which keep the interval honest where few queries
    differ, have the largest loss that any order of these documents can cause.
    """
    a, b = (ranking.values(ranking.weights(s[ranking.rows])) for s in (baseline, candidate))
    each = per_example.values(ranking.metric, b)
    largest = float((1 - ranking.worst).max())
    return replace(mean_of_examples(a, b, largest, confidence, each), queries=ranking)


def mean_of_examples(
    a: Floats, b: Floats, largest: float, confidence: float, each: Mapping[str, Any]
) -> Metric:
    """Metric: mean of one value per example, at most 1. ceil(ln(1 / alpha)) pseudo-observations
    (Metric.imagined) each lose `largest`, as in f1_metric.

    a: values of the baseline (examples,)
    b: values of the candidate (examples,)
    largest: loss of one pseudo-observation, 0 to 1
    confidence: 1 - alpha
    each: the candidate's record per example (per_example.py)
    """
    extra = math.ceil(-math.log(1 - confidence))
    loss = extra * largest

    def mean(values: Floats, added: float = 0.0, count: int = 0) -> Value:
        return lambda w: (w @ values + added) / (w.sum(1) + count)

    return Metric(
        mean(a),
        mean(b),
        imagined=(
            (mean(a, loss, extra), mean(b, 0, extra)),
            (mean(a, 0, extra), mean(b, loss, extra)),
        ),
        each=each,
    )


RECALL = {"recall_at_1": 1, "recall_at_5": 5}
"""{metric: number of texts or images among which the right one counts}."""


def recall_metric(
    name: str, texts: Integers, baseline: Floats, candidate: Floats, confidence: float
) -> Metric:
    """Metric: mean over pairs of an image and its text of two outcomes: the text is among the best
    for the image, and the image is among the best for the text.

    name: metric of RECALL
    texts: column of each image's text, each once
    baseline, candidate: scores (images, texts)
    """
    a, b = (_recall(scores, texts, RECALL[name]) for scores in (baseline, candidate))
    return mean_of_examples(a, b, 1.0, confidence, per_example.values("recall", b))


def _recall(scores: Floats, texts: Integers, best: int) -> Floats:
    """Score each pair: (pairs,) of 0, 0.5 or 1. Others with an equal score count as better.

    scores: (images, texts)
    texts: column of each image's text
    best: number of candidates that count as best
    """
    own = scores[np.arange(len(texts)), texts]
    to_text = (scores >= own[:, None]).sum(1) <= best
    to_image = (scores[:, texts] >= own[None]).sum(0) <= best
    return np.asarray((to_text + to_image.astype(np.float64)) / 2)


def span_metric(
    name: str,
    right: Sequence[tuple[str, ...]],
    baseline: Sequence[str],
    candidate: Sequence[str],
    confidence: float,
) -> Metric:
    """Metric: exact match or F1 of answers to questions.

    name: exact_match or f1
    right: right answers of each question; empty: it has no answer
    baseline, candidate: one answer per question; "" for no answer
    """
    score = SCORES[name]
    a, b = (
        np.array([score(*both) for both in zip(answers, right, strict=True)])
        for answers in (baseline, candidate)
    )
    if name == "exact_match":  # right or wrong
        return shares(a > 0, b > 0)
    return mean_of_examples(a, b, 1.0, confidence, per_example.values("overlap", b))


def word_accuracy(
    truth: Sequence[Integers], baseline: Sequence[Integers], candidate: Sequence[Integers]
) -> Metric:
    """Metric: share of words labelled right. Texts are resampled, because words of one text depend
    on each other.

    truth, baseline, candidate: label ids (words,) of each text
    """
    counts = np.array([len(t) for t in truth], np.float64)

    def system(predicted: Sequence[Integers]) -> Value:
        pairs = zip(truth, predicted, strict=True)
        right = np.array([(t == p).sum() for t, p in pairs], np.float64)
        return lambda w: (w @ right) / (w @ counts)

    return Metric(system(baseline), system(candidate), each=per_example.labels(truth, candidate))


def f1_metric(
    truth: Sequence[Integers],
    baseline: Sequence[Integers],
    candidate: Sequence[Integers],
    confidence: float = 0.95,
) -> Metric:
    """Metric: macro F1, the mean over the labels in `truth` of 2 TP / (2 TP + FP + FN), with 0/0 =
    0.

    truth, baseline, candidate: label ids of each example: of the words of a text, or of one text

    The imagined examples have the rarest label and are mistaken for the commonest, the costliest
    single error. Their number is log(1 / alpha), the number of errors that stays unseen with
    probability alpha (three at 95 %: the rule of three).
    """
    classes = np.unique(np.concatenate(list(truth)))
    lengths = np.array([len(t) for t in truth])
    text = np.repeat(np.arange(len(lengths)), lengths)
    true = np.searchsorted(classes, np.concatenate(list(truth)))

    def counted(where: Booleans, of: Integers) -> Floats:
        counts = np.zeros((len(lengths), len(classes)))
        np.add.at(counts, (text[where], of[where]), 1)
        return counts

    occurs = counted(np.full(len(true), True), true)

    def counts(predicted: Sequence[Integers]) -> Counts:
        flat = np.concatenate(list(predicted))
        predicted_class = np.minimum(np.searchsorted(classes, flat), len(classes) - 1)
        known = classes[predicted_class] == flat
        hit = counted(known & (predicted_class == true), predicted_class)
        return hit, occurs + counted(known, predicted_class)

    each = per_example.labels(truth, candidate)
    return _f1(occurs, counts(baseline), counts(candidate), confidence, each)


def sets_f1(
    truth: Booleans,
    baseline: Booleans,
    candidate: Booleans,
    confidence: float = 0.95,
    micro: bool = False,
) -> Metric:
    """Metric: F1 of sets of labels.

    truth, baseline, candidate: (texts, labels), True for a label in the set
    micro: True to sum TP, FP and FN over all labels; False for macro F1, as f1_metric
    """
    occurs = truth.astype(np.float64)
    used = truth.any(0) | micro

    def counts(predicted: Booleans) -> Counts:
        hit, size = truth & predicted, occurs + predicted
        return hit[:, used].astype(np.float64), size[:, used]

    each = per_example.sets(truth, candidate)
    both = counts(baseline), counts(candidate)
    return _f1(occurs[:, used], *both, confidence, each, micro)


def make_indicators(sets: Sequence[Sequence[int] | Integers], labels: int) -> Booleans:
    """Convert sets of label ids, right or answered, to a matrix (rows, labels) that is True where a
    set has the label.

    labels: number of labels
    """
    matrix = np.zeros((len(sets), labels), bool)
    for row, ids in zip(matrix, sets, strict=True):
        row[list(ids)] = True
    return matrix


Counts = tuple[Floats, Floats]
"""(labels that are right, labels in truth plus labels in the answer), each (examples, classes)."""


def _f1(
    occurs: Floats,
    baseline: Counts,
    candidate: Counts,
    confidence: float,
    each: Mapping[str, Any],
    micro: bool = False,
) -> Metric:
    """Metric: F1 from the counts of two systems.

    occurs: number of each label in the truth (examples, labels)
    """
    imagined = math.ceil(-math.log(1 - confidence))
    order = np.argsort(occurs.sum(0), kind="stable")
    one = np.arange(len(order))
    rarest = 1.0 * (one == order[0])
    commonest = 1.0 * (one == order[-1]) if len(order) > 1 else 0 * rarest  # a wrong label

    def system(counts: Counts, extra: Floats | None = None) -> Value:
        hit, size = counts
        hit_more, size_more = np.zeros(len(order)), np.zeros(len(order))
        if extra is not None:
            hit_more, size_more = imagined * rarest * extra, imagined * (rarest + extra)

        def value(weights: Floats) -> Floats:
            both, total = weights @ hit + hit_more, weights @ size + size_more
            if micro:
                both, total = both.sum(1, keepdims=True), total.sum(1, keepdims=True)
            f1 = 2 * both / np.where(total > 0, total, np.inf)
            return np.asarray(f1.mean(1), np.float64)

        return value

    return Metric(
        system(baseline),
        system(candidate),
        imagined=(
            (system(baseline, rarest), system(candidate, commonest)),
            (system(baseline, commonest), system(candidate, rarest)),
        ),
        each=each,
    )
