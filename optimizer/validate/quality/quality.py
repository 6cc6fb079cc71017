"""How good the candidate's answers are, beside the baseline's on the same examples.

Metrics. Each is a Metric: right/wrong outcomes for the exact paired test, or a value of the
weighted examples for the bootstrap.

    accuracy         share of texts (or of words, for token-classification) labelled right
    f1               macro F1 over the labels that occur in the data
    spearman         rank correlation of the pair's cosine (or of a regression's value) with score
    probe_accuracy   a ridge classifier fit on the baseline's embeddings of `train`
    retrieval        with text_pair: the nearest of all pair texts is the text's own;
                     else with label: the nearest other text has the same label
    cosine           mean cosine of the candidate's answers to the baseline's, whose value is 1

Both systems answer through the same code (harness.tasks), so that what is measured is what is
served; this module only compares arrays. `drop` is baseline - candidate everywhere;
the report's `difference` is candidate - baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from optimizer.errors import DataError
from optimizer.load.datasets import Sample
from optimizer.validate.quality import each, significance
from optimizer.validate.quality.evaluation import check_classes
from optimizer.validate.quality.significance import Decision, Floats

Value = Callable[[Floats], Floats]
Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[Any]


@dataclass(frozen=True)
class Answers:
    """One system's answers: a vector per text (embedding, logits, or hidden states flattened),
    one per text_pair where there is one, and a label id per word for token-classification."""

    text: tuple[Floats, ...]
    pair: tuple[Floats, ...] | None = None
    words: tuple[Integers, ...] | None = None


@dataclass(frozen=True)
class Metric:
    """baseline and candidate: weights (rows, examples) -> value (rows,). outcomes: right/wrong of
    both per example, where the metric is the share of right ones. imagined: lost and won,
    (baseline, candidate) each with a few imagined examples more, on which only the baseline, or
    only the candidate, is right; for metrics of rare disagreements (see significance.resampled)."""

    baseline: Value
    candidate: Value
    outcomes: tuple[Booleans, Booleans] | None = None
    imagined: tuple[tuple[Value, Value], tuple[Value, Value]] | None = None


def judge(
    name: str,
    metric: Metric,
    examples: int,
    margin: float,
    confidence: float,
    cosines: Floats | None,
) -> tuple[Decision, dict[str, Any]]:
    """The decision, and the report's `quality` section.

    cosines (examples,): of the candidate's answers to the baseline's; None where they have none.
    """
    if metric.outcomes is not None:
        decision = significance.paired_outcomes(*metric.outcomes, margin, confidence)
    else:
        decision = significance.resampled(
            _drop(metric.baseline, metric.candidate),
            examples,
            margin,
            confidence,
            imagined=metric.imagined and (_drop(*metric.imagined[0]), _drop(*metric.imagined[1])),
        )
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
        "cosine": None if cosines is None else each.summary(cosines),
    }
    if metric.outcomes is not None:
        section["each"] = each.right(metric.outcomes[1])
    elif name == "cosine" and cosines is not None:
        section["each"] = each.values(name, cosines)
    return decision, section


def _drop(baseline: Value, candidate: Value) -> Value:
    return lambda weights: baseline(weights) - candidate(weights)


def _value(metric: Metric, which: int, examples: int, confidence: float) -> dict[str, Any]:
    """A system's own value with a two-sided interval: Wilson's score interval for shares, the BCa
    bootstrap otherwise."""
    value = (metric.baseline, metric.candidate)[which]
    estimate = float(value(np.ones((1, examples)))[0])
    if metric.outcomes is not None:
        return {"value": estimate, "interval": list(wilson(estimate, examples, confidence))}
    replicates = significance.bootstrap(value, examples, seed=1, resamples=1000)
    jackknife = significance.leave_one_out(value, examples)
    tail = (1 - confidence) / 2
    bounds = [significance.bca_bound(replicates, estimate, jackknife, t) for t in (tail, 1 - tail)]
    return {"value": estimate, "interval": bounds}


def wilson(share: float, examples: int, confidence: float) -> tuple[float, float]:
    """Wilson's (1927) score interval of a share."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = share + z * z / (2 * examples)
    reach = z * math.sqrt(share * (1 - share) / examples + (z / (2 * examples)) ** 2)
    scale = 1 + z * z / examples
    return max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)


def cosines_of(a: Sequence[Floats], b: Sequence[Floats]) -> Floats:
    """The cosine of each pair of vectors; 1 for two zero vectors, 0 for one."""
    cosines = []
    for x, y in zip(a, b, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        product = float(np.linalg.norm(x) * np.linalg.norm(y))
        same = float(np.array_equal(x, y))
        cosines.append(float(x @ y) / product if product > 0 else same)
    return np.array(cosines)


def compare(
    name: str,
    rows: Sequence[Sample],
    baseline: Answers,
    candidate: Answers,
    train: tuple[Sequence[Sample], Answers] | None = None,
    confidence: float = 0.95,
) -> Metric:
    """The metric `name` of two systems' answers to `rows`.

    train: labelled rows and the baseline's answers to them, for probe_accuracy. Raises DataError
    when the rows lack what the metric needs.
    """
    if name == "cosine":
        values = cosines_of(baseline.text, candidate.text)
        return Metric(lambda w: np.ones(len(w)), lambda w: w @ values / w.sum(1))
    if name == "spearman":
        scores = np.array(_need(rows, "score", name), np.float64)
        return Metric(
            spearman(similarity(baseline), scores), spearman(similarity(candidate), scores)
        )
    if name == "retrieval":
        return shares(_hits(rows, baseline), _hits(rows, candidate))
    if name == "probe_accuracy":
        labels = np.array(_need(rows, "label", name))
        if train is None:
            raise DataError(
                "missing",
                where="validate.train",
                fix="probe_accuracy fits a classifier: name labelled rows, not validate.data's.",
            )
        probe = Probe.fit(
            np.stack(train[1].text), np.array(_need(train[0], "label", "validate.train"))
        )
        return shares(
            probe.predict(np.stack(baseline.text)) == labels,
            probe.predict(np.stack(candidate.text)) == labels,
        )
    if name not in ("accuracy", "f1"):
        raise ValueError(f"unknown metric {name!r}")
    if baseline.words is not None and candidate.words is not None:
        truth = [np.array(t) for t in _need(rows, "tags", name)]
        if name == "accuracy":
            return word_accuracy(truth, baseline.words, candidate.words)
        return f1_metric(truth, baseline.words, candidate.words, confidence)
    labels = np.array(_need(rows, "label", name))
    _check_labels(labels, len(baseline.text[0]))
    a, b = (np.stack(s.text).argmax(1) for s in (baseline, candidate))
    if name == "accuracy":
        return shares(a == labels, b == labels)
    return f1_metric(list(labels[:, None]), list(a[:, None]), list(b[:, None]), confidence)


def _need(rows: Sequence[Sample], field: str, metric: str) -> list[Any]:
    values = [getattr(r, field) for r in rows]
    if any(v is None for v in values):
        raise DataError(
            f"rows have no {field}, and metric {metric} needs one",
            where="validate.data",
            accepted="cosine, which needs texts only; retrieval, with a text_pair or a label",
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


def shares(baseline: Booleans, candidate: Booleans) -> Metric:
    """The share of right outcomes."""
    a, b = baseline.astype(np.float64), candidate.astype(np.float64)
    return Metric(
        lambda w: w @ a / w.sum(1), lambda w: w @ b / w.sum(1), outcomes=(baseline, candidate)
    )


def similarity(answers: Answers) -> Floats:
    """What is ranked: the cosine of each pair, or a regression's single value."""
    if answers.pair is not None:
        return cosines_of(answers.text, answers.pair)
    if answers.text[0].size == 1:
        return np.array([float(t[0]) for t in answers.text])
    raise DataError(
        "rows have no text_pair, and metric spearman ranks the similarity of pairs",
        where="validate.data",
        fix="Add it to the data spec: columns: {text_pair: <column>}.",
    )


def spearman(values: Floats, scores: Floats) -> Value:
    """weights (rows, n) -> Pearson's correlation of the mid-ranks of the weighted examples."""
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
    """weights -> the mid-rank of each example when it occurs `weight` times; ties share one."""
    unique, group = np.unique(values, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(len(unique)))

    def ranks(weights: Floats) -> Floats:
        sizes = np.add.reduceat(weights[:, order], starts, axis=1)
        before = np.cumsum(sizes, axis=1) - sizes
        return np.asarray((before + (sizes + 1) / 2)[:, group], np.float64)

    return ranks


def word_accuracy(
    truth: Sequence[Integers], baseline: Sequence[Integers], candidate: Sequence[Integers]
) -> Metric:
    """The share of words labelled right. A text is one example: its words are not independent, so
    whole texts are resampled."""
    counts = np.array([len(t) for t in truth], np.float64)

    def system(predicted: Sequence[Integers]) -> Value:
        pairs = zip(truth, predicted, strict=True)
        right = np.array([(t == p).sum() for t, p in pairs], np.float64)
        return lambda w: (w @ right) / (w @ counts)

    return Metric(system(baseline), system(candidate))


def f1_metric(
    truth: Sequence[Integers],
    baseline: Sequence[Integers],
    candidate: Sequence[Integers],
    confidence: float = 0.95,
) -> Metric:
    """Macro F1 = the mean over the labels in `truth` of 2 TP / (2 TP + FP + FN), with 0/0 = 0.

    Each element is one example: the labels of one text's words, or the one label of a text.
    The imagined examples of `lost` and `won` have the rarest label and are mistaken for the
    commonest, the costliest single error; there are log(1 / alpha) of them, as many as can occur
    unseen with probability alpha (three at 95 %: the rule of three).
    """
    imagined = math.ceil(-math.log(1 - confidence))
    classes, counts = np.unique(np.concatenate(list(truth)), return_counts=True)

    lengths = np.array([len(t) for t in truth])
    text = np.repeat(np.arange(len(lengths)), lengths)
    true = np.searchsorted(classes, np.concatenate(list(truth)))

    def counted(where: Booleans, of: Integers) -> Floats:
        counts = np.zeros((len(lengths), len(classes)))
        np.add.at(counts, (text[where], of[where]), 1)
        return counts

    def system(predicted: Sequence[Integers], extra: Integers | None = None) -> Value:
        flat = np.concatenate(list(predicted))
        predicted_class = np.minimum(np.searchsorted(classes, flat), len(classes) - 1)
        known = classes[predicted_class] == flat
        hit = counted(known & (predicted_class == true), predicted_class)
        size = counted(np.full(len(true), True), true) + counted(known, predicted_class)
        hit_more, size_more = np.zeros(len(classes)), np.zeros(len(classes))
        if extra is not None:
            hit_more = imagined * 1.0 * ((classes == rarest) & (classes == extra))
            size_more = imagined * (1.0 * (classes == rarest) + (classes == extra))

        def value(weights: Floats) -> Floats:
            both, total = weights @ hit + hit_more, weights @ size + size_more
            f1 = 2 * both / np.where(total > 0, total, np.inf)
            return np.asarray(f1.mean(1), np.float64)

        return value

    order = np.argsort(counts, kind="stable")
    rarest = classes[order[:1]]
    commonest = classes[order[-1:]] if len(classes) > 1 else rarest - 1  # no label: just wrong
    return Metric(
        system(baseline),
        system(candidate),
        imagined=(
            (system(baseline, rarest), system(candidate, commonest)),
            (system(baseline, commonest), system(candidate, rarest)),
        ),
    )


def _hits(rows: Sequence[Sample], answers: Answers) -> Booleans:
    """retrieval: whether the nearest candidate is a right one."""
    field = "label" if answers.pair is None else "text_pair"
    labels = np.array(_need(rows, field, "retrieval"))
    same: Booleans = labels[nearest(answers)] == labels
    return same


def nearest(answers: Answers) -> Integers:
    """The row whose pair, or else whose text and not the own, is nearest to each text by cosine."""
    queries = _unit(answers.text)
    if answers.pair is not None:
        return np.asarray((queries @ _unit(answers.pair).T).argmax(1))
    cosines = queries @ queries.T
    np.fill_diagonal(cosines, -np.inf)
    return np.asarray(cosines.argmax(1))


def _unit(vectors: Sequence[Floats]) -> Floats:
    stacked = np.stack(vectors).astype(np.float64)
    unit: Floats = stacked / np.maximum(np.linalg.norm(stacked, axis=1, keepdims=True), 1e-12)
    return unit


@dataclass(frozen=True)
class Probe:
    """A linear classifier in closed form: ridge regression onto +1/-1 labels, with the strength
    that predicts the left-out rows best (PRESS; Hastie, Tibshirani, Friedman, eq. 7.52)."""

    classes: Integers
    mean: Floats
    weight: Floats
    bias: Floats

    @staticmethod
    def fit(features: Floats, labels: Integers) -> Probe:
        """features (n, width), labels (n,). Deterministic."""
        check_classes(labels.tolist())
        classes = np.unique(labels)
        targets = np.where(labels[:, None] == classes[None], 1.0, -1.0)
        mean, bias = features.astype(np.float64).mean(0), targets.mean(0)
        u, s, vt = np.linalg.svd(features - mean, full_matrices=False)
        seen = u.T @ (targets - bias)
        best: tuple[float, Floats] | None = None
        for strength in s[0] ** 2 * np.logspace(-6, 1, 15):
            shrink = s**2 / (s**2 + strength)
            fitted = u @ (shrink[:, None] * seen) + bias
            leverage = np.minimum((u**2) @ shrink + 1 / len(labels), 1 - 1e-9)
            error = float((((targets - fitted) / (1 - leverage)[:, None]) ** 2).mean())
            if best is None or error < best[0]:
                best = (error, vt.T @ ((s / (s**2 + strength))[:, None] * seen))
        assert best is not None
        return Probe(classes, mean, best[1], bias)

    def predict(self, features: Floats) -> npt.NDArray[Any]:
        scores = (features - self.mean) @ self.weight + self.bias
        predicted: npt.NDArray[Any] = self.classes[scores.argmax(1)]
        return predicted
