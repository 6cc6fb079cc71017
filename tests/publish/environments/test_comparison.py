"""Tests of the paired test of two bundles, by the per-example results in their reports."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from optimizer.publish.environments import comparison as comparisons
from optimizer.publish.environments.comparison import MetricComparison, compare
from optimizer.validate.quality import quality
from optimizer.validate.quality.metrics import (
    Metric,
    f1_metric,
    rank_correlation,
    sets_f1,
    shares,
    word_accuracy,
)
from optimizer.validate.quality.significance import Decision

EXAMPLES, MARGIN, CONFIDENCE = 300, 0.03, 0.95
RNG = np.random.default_rng(0)
LABELS = RNG.choice(3, (EXAMPLES, 4), p=[0.6, 0.3, 0.1])
SCORES = RNG.standard_normal(EXAMPLES)
ERRORS = RNG.random(LABELS.shape)
NOISE = RNG.standard_normal(EXAMPLES)


def labelled(errors: float) -> list[np.ndarray]:
    """Return four words per text; more errors include those of fewer errors."""
    return list(np.where(errors > ERRORS, (LABELS + 1) % 3, LABELS))


def metric(name: str, old: float, new: float) -> Metric:
    """Build the per-example results of two systems with these error rates."""
    if name == "f1":
        return f1_metric(list(LABELS), labelled(old), labelled(new))
    if name == "accuracy":
        return word_accuracy(list(LABELS), labelled(old), labelled(new))
    if name == "retrieval":
        return shares(ERRORS[:, 0] >= old, ERRORS[:, 0] >= new)
    if name == "micro_f1":
        truth, one, other = (LABELS == 0, *(np.stack(labelled(x)) == 0 for x in (old, new)))
        return sets_f1(truth, one, other, micro=True)
    if name == "spearman of lists":
        truth = np.stack([SCORES, -SCORES], 1)
        noise = np.stack([NOISE, NOISE], 1)
        return rank_correlation(truth + old * noise, truth + new * noise, truth)
    return rank_correlation(SCORES + old * NOISE, SCORES + new * NOISE, SCORES)


@cache
def judged(name: str, old: float, new: float) -> tuple[Decision, dict[str, Any]]:
    """Decision of the quality gate and its section of the report."""
    return quality.judge(name, metric(name, old, new), EXAMPLES, MARGIN, CONFIDENCE, None)


def compared(old: dict[str, Any], new: dict[str, Any]) -> MetricComparison:
    manifest = {"calibration": {"validate": "digest"}}
    reports = ([json.loads(json.dumps({"target": "t", "quality": q}))] for q in (old, new))
    (comparison,) = compare(manifest, next(reports), manifest, next(reports))
    return comparison


@pytest.mark.parametrize(
    "name", ["f1", "micro_f1", "accuracy", "retrieval", "spearman", "spearman of lists"]
)
@pytest.mark.parametrize(
    ("old", "new", "verdict"), [(0.1, 0.1, "pass"), (0.1, 0.4, "fail"), (0.4, 0.1, "pass")]
)
def test_the_comparison_is_the_gate_with_the_old_bundle_for_the_float_model(
    name: str, old: float, new: float, verdict: str
) -> None:
    """An equal model passes, a worse one fails, as in the quality gate."""
    decision, section = judged(name, old, new)
    _, before = judged(name, old, old)
    comparison = compared(before, section)
    low, high = decision.interval
    assert comparison.verdict == decision.verdict == verdict
    assert (comparison.worse_by, comparison.interval) == (decision.drop, (low, high))


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (Decision("fail", 0.1, (0.07, 0.13), 0.02, 0.95, 400, None), "worse by 0.1000 (0.0700 to"),
        (Decision("pass", -0.1, (-0.13, -0.07), 0.02, 0.95, 400, None), "better by 0.1000 (0.07"),
        (Decision("pass", 0.0, (0.0, 0.0), 0.02, 0.95, 400, None), "equal on 400 examples"),
        (
            Decision("pass", 0.0, (-0.01, 0.01), 0.02, 0.95, 400, None),
            "cannot be told: equal (0.0100 better to 0.0100 worse;",
        ),
    ],
)
def test_the_sentence_begins_with_what_was_found(decision: Decision, text: str) -> None:
    assert comparisons.describe_decision(decision, "").startswith(text)


def section(**each: Any) -> dict[str, Any]:
    return {"metric": "f1", "margin": MARGIN, "confidence": CONFIDENCE, "each": each}


GOOD = section(kind="labels", truth=["0", "1"], candidate=["0", "1"])
UNREADABLE = {
    "a kind that is not known": section(kind="x", candidate="01"),
    "more answers than labels": section(kind="labels", truth=["0", "1"], candidate=["0", "1 1"]),
    "no numbers": section(kind="labels", truth=["0", "1"], candidate=["0", "b"]),
    "no truth": section(kind="labels", candidate=["0", "1"]),
    "scores that are NaN": section(kind="scores", truth=[0, 1], candidate=[0.0, float("nan")]),
    "scores of several dimensions": section(kind="scores", truth=[[0], [1]], candidate=[[0], [1]]),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_results_that_cannot_be_read_decide_nothing(what: str) -> None:
    comparison = compared(UNREADABLE[what], UNREADABLE[what])
    assert comparison.verdict == "inconclusive"
    assert "cannot be read" in comparison.message


def test_rows_with_labels_of_other_numbers_are_not_compared() -> None:
    other = section(kind="labels", truth=["1", "0"], candidate=["1", "0"])
    comparison = compared(GOOD, other)
    assert (comparison.verdict, "the labels" in comparison.message) == ("inconclusive", True)
