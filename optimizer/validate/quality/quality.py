"""Compare the answers of candidate and baseline on the same examples.

Metrics. Each is a Metric: right/wrong outcomes for the exact paired test, or a value of the
weighted examples for the bootstrap.

    accuracy         share of texts (or of words, for token-classification) labelled right
    top5_accuracy    share of images whose label is among the five that score highest
    agreement        share of images that get the baseline's label; the baseline's own value is 1
    f1               macro F1 over the labels that occur in the data
    micro_f1         F1 over all labels of all texts, of a multi-label model
    spearman         rank correlation of the pair's cosine (or of a regression's value) with score;
                     of a regression with several outputs the mean of theirs
    probe_accuracy   accuracy of a ridge classifier fitted to the baseline's embeddings of `train`
    recall_at_1, recall_at_5  of pairs of an image and a text: mean of two shares, of images whose
                     text is among the 1 or 5 that fit best, and of texts whose image is; with
                     text_pair both sides as each system has them, else label and the logits
    retrieval        with text_pair: share of texts whose nearest pair text is their own;
                     else with label: share whose nearest other text has the same label
    ndcg, mrr        mean over queries of nDCG@10, or of the reciprocal rank of the first relevant
                     document; a query is the rows of one text, relevance their score or label
    log_likelihood   mean log-probability of masked tokens, in nats: 15 % of each text's, drawn by
                     its digest; of fill-mask, whose `agreement` is the share of those tokens
                     that get the baseline's likeliest one
    exact_match, f1  of answers that are spans: data/answers.py; their `agreement` is the share of
                     questions that get the baseline's answer
    cosine           mean cosine of the candidate's answers to the baseline's, whose value is 1

Both systems answer through the same code as a served bundle (harness.tasks); this module only
compares arrays. `drop` is baseline - candidate everywhere; the report's `difference` is
candidate - baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from optimizer.data.datasets import Sample
from optimizer.foundation.errors import DataError
from optimizer.validate.quality import per_example, significance
from optimizer.validate.quality.evaluation import (
    check_captions,
    check_classes,
    check_pairs,
    group_ranking,
)
from optimizer.validate.quality.images.observed import COLUMNS, METRICS
from optimizer.validate.quality.metrics import (
    RANKING,
    RECALL,
    Booleans,
    Integers,
    Metric,
    decide,
    f1_metric,
    make_indicators,
    mean_cosine,
    mean_log_likelihood,
    rank_correlation,
    ranking_metric,
    recall_metric,
    sets_f1,
    shares,
    span_metric,
    word_accuracy,
)
from optimizer.validate.quality.significance import Decision, Floats

BEST = 5  # labels of top5_accuracy
PER_ROW = ("text", "pair", "words", "spans", "seen")
"""Fields of Answers with a value per row; the others are of the model."""


@dataclass(frozen=True)
class Answers:
    """Answers of one system that is judged, one entry per row.

    text: embedding, logits, or flattened hidden states; for fill-mask the log-probabilities of the
        masked tokens; for question answering the logits of all windows
    pair: the same of text_pair; None without pairs
    words: label ids: one per word (token-classification), per masked token (fill-mask), or per
        label in the answer (multi-label)
    spans: answer to each question; None for other tasks
    seen: observations of each image's answer (images/observed.py); None for other tasks
    dot: True for vectors that are compared by their product, which depends on their lengths
    sizes: numbers of each of the arrays that are joined in `text`; () for one
    """

    text: tuple[Floats, ...]
    pair: tuple[Floats, ...] | None = None
    words: tuple[Integers, ...] | None = None
    spans: tuple[str, ...] | None = None
    dot: bool = False
    sizes: tuple[int, ...] = ()
    seen: tuple[Any, ...] | None = None

    def of_rows(self, rows: Sequence[int]) -> Answers:
        """Return the system's answers to the rows of these numbers alone."""

        def some(values: tuple[Any, ...] | None) -> Any:
            return None if values is None else tuple(values[i] for i in rows)

        return replace(self, **{name: some(getattr(self, name)) for name in PER_ROW})


def judge(
    name: str,
    metric: Metric,
    examples: int,
    margin: float,
    confidence: float,
    cosines: Floats | None,
) -> tuple[Decision, dict[str, Any]]:
    """Judge metric `name`: (decision, the report's `quality` section).

    metric: metric of two systems
    examples: number of examples
    margin: largest accepted drop
    confidence: 1 - alpha of the test
    cosines: cosines (examples,) of the candidate's answers to the baseline's; None: not defined
    """
    if metric.queries is not None:
        examples = len(metric.queries.starts)
    decision = decide(metric, examples, margin, confidence)
    low, high = decision.interval
    section = {
        "metric": name,
        "examples": examples,
        "baseline": _value(metric, 0, examples, confidence),
        "candidate": _value(metric, 1, examples, confidence),
        "difference": {"value": -decision.drop, "interval": [-high, -low]},
        "margin": margin,
        "confidence": confidence,
        "needed": decision.needed,
        "cosine": None if cosines is None else per_example.summary(cosines),
    }
    if metric.queries is not None:
        section["left_out"] = metric.queries.left_out
    if metric.each is not None:
        section["each"] = dict(metric.each)
    return decision, section


def _value(metric: Metric, which: int, examples: int, confidence: float) -> dict[str, Any]:
    """Measure a metric's value of one system with a two-sided interval: Wilson's score interval for
    shares, else the BCa bootstrap.

    which: 0 for the baseline, 1 for the candidate
    """
    value = (metric.baseline, metric.candidate)[which]
    estimate = float(value(np.ones((1, examples)))[0])
    if metric.outcomes is not None:
        return {"value": estimate, "interval": list(wilson(estimate, examples, confidence))}
    replicates = significance.resample(value, examples, seed=1, resamples=1000)
    jackknife = significance.leave_one_out(value, examples)
    tail = (1 - confidence) / 2
    bounds = [significance.bca_bound(replicates, estimate, jackknife, t) for t in (tail, 1 - tail)]
    return {"value": estimate, "interval": bounds}


def wilson(share: float, examples: int, confidence: float) -> tuple[float, float]:
    """Compute Wilson's (1927) score interval of a share of `examples`, for the report of
    quality."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = share + z * z / (2 * examples)
    reach = z * math.sqrt(share * (1 - share) / examples + (z / (2 * examples)) ** 2)
    scale = 1 + z * z / examples
    return max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)


def compute_cosines(a: Sequence[Floats], b: Sequence[Floats]) -> Floats:
    """Compute, to compare two systems' answers, the cosine of each pair of vectors: (examples,); 1
    for two zero vectors, 0 where one is zero."""
    cosines = []
    for x, y in zip(a, b, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        product = float(np.linalg.norm(x) * np.linalg.norm(y))
        same = float(np.array_equal(x, y))
        cosines.append(float(x @ y) / product if product > 0 else same)
    return np.array(cosines)


def compare_by_cosine(baseline: Answers, candidate: Answers) -> Floats:
    """Compute the cosine of each row's answers (examples,). Where an answer joins several arrays it
    is the least of their cosines, because a large array would hide the others."""
    if len(baseline.sizes) < 2:
        return compute_cosines(baseline.text, candidate.text)
    cuts = np.cumsum(baseline.sizes)[:-1]
    one, other = ([np.split(row, cuts) for row in a.text] for a in (baseline, candidate))
    each = [
        compute_cosines([row[i] for row in one], [row[i] for row in other])
        for i in range(len(baseline.sizes))
    ]
    least: Floats = np.min(each, axis=0)
    return least


def compare(
    metric: str,
    rows: Sequence[Sample],
    baseline: Answers,
    candidate: Answers,
    train: tuple[Sequence[Sample], Answers] | None = None,
    confidence: float = 0.95,
) -> Metric:
    """Compute `validate.metric` of two systems' answers to `rows`. Raises DataError when the rows
    lack a column that the metric needs.

    train: labelled rows and the baseline's answers to them, for probe_accuracy
    """
    systems = (baseline, candidate)
    if metric == "cosine":
        return mean_cosine(compare_by_cosine(baseline, candidate))
    if baseline.seen is not None and candidate.seen is not None:
        return _of_images(metric, rows, baseline.seen, candidate.seen, confidence)
    if metric == "spearman":
        scores = read_targets(rows)
        ours, theirs = (score_pairs(answers, scores.shape[1:]) for answers in (candidate, baseline))
        return rank_correlation(theirs, ours, scores)
    if metric in RANKING:
        ranked = group_ranking(metric, rows)
        return ranking_metric(ranked, score_pairs(baseline), score_pairs(candidate), confidence)
    if metric == "retrieval":
        return shares(_hits(rows, baseline), _hits(rows, candidate))
    if metric == "probe_accuracy":
        labels = np.array(_need(rows, "label", metric))
        if train is None:
            raise DataError(
                "missing",
                where="validate.train",
                fix="Give labelled rows other than validate.data's: probe_accuracy fits a "
                "classifier to them.",
            )
        probe = Probe.fit(
            np.stack(train[1].text), np.array(_need(train[0], "label", "validate.train"))
        )
        return shares(
            probe.predict(np.stack(baseline.text)) == labels,
            probe.predict(np.stack(candidate.text)) == labels,
        )
    if metric == "log_likelihood":
        return mean_log_likelihood(*(np.array([t.mean() for t in a.text]) for a in systems))
    if baseline.spans is not None and candidate.spans is not None:
        if metric == "agreement":
            same: Booleans = np.array(baseline.spans) == np.array(candidate.spans)
            return shares(np.ones_like(same), same)
        right_answers = _need(rows, "answers", metric)
        return span_metric(metric, right_answers, baseline.spans, candidate.spans, confidence)
    if metric == "agreement" and baseline.words is not None and candidate.words is not None:
        return word_accuracy(baseline.words, baseline.words, candidate.words)
    if metric == "agreement":
        same = _first(baseline) == _first(candidate)
        return shares(np.ones_like(same), same)
    if metric in RECALL:
        return _recall(metric, rows, systems, confidence)
    if metric == "top5_accuracy":
        labels = np.array(_need(rows, "label", metric))
        _check_labels(labels, len(baseline.text[0]))
        return shares(_among_best(baseline, labels), _among_best(candidate, labels))
    if metric == "micro_f1" or (metric == "f1" and rows[0].labels is not None):
        sets = (_need(rows, "labels", metric), baseline.words or (), candidate.words or ())
        right, one, other = (make_indicators(ids, len(baseline.text[0])) for ids in sets)
        return sets_f1(right, one, other, confidence, metric == "micro_f1")
    if metric not in ("accuracy", "f1"):
        raise ValueError(f"unknown metric {metric!r}")
    if baseline.words is not None and candidate.words is not None:
        truth = [np.array(t) for t in _need(rows, "tags", metric)]
        if metric == "accuracy":
            return word_accuracy(truth, baseline.words, candidate.words)
        return f1_metric(truth, baseline.words, candidate.words, confidence)
    labels = np.array(_need(rows, "label", metric))
    _check_labels(labels, len(baseline.text[0]))
    a, b = _first(baseline), _first(candidate)
    if metric == "accuracy":
        return shares(a == labels, b == labels)
    return f1_metric(list(labels[:, None]), list(a[:, None]), list(b[:, None]), confidence)


def _recall(
    name: str, rows: Sequence[Sample], systems: tuple[Answers, Answers], confidence: float
) -> Metric:
    """Metric: recall of pairs of an image and a text. Captions are ranked by the cosines of their
    vectors, labels by the logits.

    systems: answers of (baseline, candidate)
    """
    if all(answers.pair is not None for answers in systems):
        check_captions(name, rows)
        before, after = (_unit(a.text) @ _unit(a.pair or ()).T for a in systems)
        return recall_metric(name, np.arange(len(rows)), before, after, confidence)
    texts = np.array(_need(rows, "label", name))
    before, after = (np.stack(a.text) for a in systems)
    check_pairs(name, texts, before.shape[1])
    return recall_metric(name, texts, before, after, confidence)


def _of_images(
    name: str,
    rows: Sequence[Sample],
    baseline: Sequence[Any],
    candidate: Sequence[Any],
    confidence: float,
) -> Metric:
    for field in COLUMNS.get(name, ()):
        _need(rows, field, name)
    return METRICS[type(baseline[0]), name](baseline, candidate, confidence)


def read_targets(rows: Sequence[Sample]) -> Floats:
    """Read the scores that a metric of quality compares answers with: (rows,), or (rows, outputs)
    where each row has a list."""
    field = "score" if rows[0].scores is None else "scores"
    scores = _need(rows, field, "spearman")
    sizes = {len(s) for s in scores if isinstance(s, tuple)}
    if len(sizes) > 1:
        raise DataError(
            f"rows have {' and '.join(map(str, sorted(sizes)))} scores",
            where="validate.data: columns.score",
            accepted="lists with a number per output of the model",
        )
    return np.array(scores, np.float64)


def _need(rows: Sequence[Sample], field: str, metric: str) -> list[Any]:
    values = [getattr(r, field) for r in rows]
    if any(v is None for v in values):
        raise DataError(
            f"rows have no {field}, and metric {metric} needs one",
            where="validate.data",
            accepted="metric cosine, which needs texts only; retrieval, which needs a text_pair or "
            "a label",
            fix=f"Add it to the data spec: columns: {{{field}: <column>}}.",
        )
    return values


def _check_labels(labels: Integers, outputs: int) -> None:
    if labels.max() >= outputs:
        raise DataError(
            f"label id {labels.max()}, and the model has {outputs} labels",
            where="validate.data",
            fix="Give the label names in the model's order: labels: [...].",
        )


def _first(answers: Answers) -> Integers:
    """Return the id of the label with the highest score in a system's answer to each text or image
    (rows,)."""
    labels: Integers = np.stack(answers.text).argmax(1)
    return labels


def _among_best(answers: Answers, labels: Integers) -> Booleans:
    """Return (rows,), True where the label is one of the BEST with the highest scores. Raises
    DataError for a model of at most BEST labels, for which it always is."""
    scores = np.stack(answers.text)
    if scores.shape[1] <= BEST:
        raise DataError(
            f"the model has {scores.shape[1]} labels: the best {BEST} always include the right one",
            where="validate.metric",
            accepted="accuracy",
        )
    best = np.argsort(-scores, axis=1, kind="stable")[:, :BEST]
    among: Booleans = (best == labels[:, None]).any(1)
    return among


def score_pairs(answers: Answers, shape: tuple[int, ...] = ()) -> Floats:
    """Return the values that spearman ranks: the cosine or product of each pair, a regression's
    value (texts,), or its values (texts, outputs).

    shape: shape of a row's scores; (): one number
    """
    if answers.pair is not None and answers.dot:
        return np.array([float(np.dot(*p)) for p in zip(answers.text, answers.pair, strict=True)])
    if answers.pair is not None:
        return compute_cosines(answers.text, answers.pair)
    if shape == answers.text[0].shape:
        return np.stack(answers.text).astype(np.float64)
    if answers.text[0].size == 1 and not shape:
        return np.array([float(t[0]) for t in answers.text])
    if shape:
        raise DataError(
            f"rows have {shape[0]} scores, and the model answers with {answers.text[0].size}",
            where="validate.data: columns.score",
            accepted="lists with a number per output of the model",
        )
    raise DataError(
        "rows have no text_pair, and metric spearman ranks the similarity of pairs",
        where="validate.data",
        fix="Add it to the data spec: columns: {text_pair: <column>}.",
    )


def _hits(rows: Sequence[Sample], answers: Answers) -> Booleans:
    """Return (rows,), True where the nearest vector has the row's label, or is that of its own pair
    text."""
    field = "label" if answers.pair is None else "text_pair"
    labels = np.array(_need(rows, field, "retrieval"))
    same: Booleans = labels[find_nearest(answers)] == labels
    return same


def find_nearest(answers: Answers) -> Integers:
    """Return the row number of the nearest text of each text: among the pair texts, where there are
    some, else among the other texts."""
    scaled = np.stack if answers.dot else _unit
    queries = scaled(answers.text)
    if answers.pair is not None:
        return np.asarray((queries @ scaled(answers.pair).T).argmax(1))
    near = queries @ queries.T
    np.fill_diagonal(near, -np.inf)
    return np.asarray(near.argmax(1))


def _unit(vectors: Sequence[Floats]) -> Floats:
    stacked = np.stack(vectors).astype(np.float64)
    unit: Floats = stacked / np.maximum(np.linalg.norm(stacked, axis=1, keepdims=True), 1e-12)
    return unit


@dataclass(frozen=True)
class Probe:
    """Linear classifier of metric probe_accuracy in closed form: ridge regression onto +1/-1
    labels, with the strength that predicts left-out rows best (PRESS; Hastie, Tibshirani, Friedman,
    eq. 7.52)."""

    classes: Integers
    mean: Floats
    weight: Floats
    bias: Floats

    @staticmethod
    def fit(features: Floats, labels: Integers) -> Probe:
        """Fit the probe to a system's features (n, width) and labels (n,). Deterministic."""
        check_classes(labels.tolist())
        classes = np.unique(labels)
        targets = np.where(labels[:, None] == classes[None], 1.0, -1.0)
        mean, bias = features.astype(np.float64).mean(0), targets.mean(0)
        u, s, vt = np.linalg.svd(features - mean, full_matrices=False)
        projected = u.T @ (targets - bias)
        best: tuple[float, Floats] | None = None
        for strength in s[0] ** 2 * np.logspace(-6, 1, 15):
            shrink = s**2 / (s**2 + strength)
            fitted = u @ (shrink[:, None] * projected) + bias
            leverage = np.minimum((u**2) @ shrink + 1 / len(labels), 1 - 1e-9)
            error = float((((targets - fitted) / (1 - leverage)[:, None]) ** 2).mean())
            if best is None or error < best[0]:
                best = (error, vt.T @ ((s / (s**2 + strength))[:, None] * projected))
        assert best is not None
        return Probe(classes, mean, best[1], bias)

    def predict(self, features: Floats) -> Integers:
        """Predict by the probe the label (n,) of each row of features (n, width)."""
        scores = (features - self.mean) @ self.weight + self.bias
        predicted: Integers = self.classes[scores.argmax(1)]
        return predicted
