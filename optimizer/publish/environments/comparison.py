"""Test if a bundle is worse than another, by the per-example results in their reports.

validate/quality/per_example.py writes these results. The test is that of the quality gate
(validate/quality/metrics.py), at the new bundle's margin and confidence; the old bundle takes the
place of the float model. Cosines, perplexities and values per query
are compared as means of one number per example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimizer.foundation.verdicts import Verdict
from optimizer.validate.quality import metrics
from optimizer.validate.quality.per_example import read_labels
from optimizer.validate.quality.significance import Decision, Floats, decide_by_mean

Each = Mapping[str, Any]
UNITS = {"nats": " nats per token", "log_likelihood": " nats per token"}
"""{kind of a per-example result: unit of a difference}."""
FIRST = "validate"
"""Use of validate.data, a key of the manifest's calibration."""


@dataclass(frozen=True)
class MetricComparison:
    """Result of the test, at a promotion, of the new bundle's metric on one target.

    verdict: "pass" if the new bundle is worse by less than the margin
    message: sentence with the difference, its interval and what it means for the margin
    worse_by, interval: difference of the metric and its bounds, positive where the new bundle is
        worse; None where the two cannot be compared
    """

    target: str
    metric: str
    verdict: Verdict
    message: str
    worse_by: float | None = None
    interval: tuple[float, float] | None = None


def compare(
    old_manifest: Mapping[str, Any],
    old_reports: Sequence[Mapping[str, Any]],
    new_manifest: Mapping[str, Any],
    new_reports: Sequence[Mapping[str, Any]],
) -> tuple[MetricComparison, ...]:
    """Compare for a promotion each target and metric that the old and the new bundle have.

    The examples of two reports are the same if their data sets have the same digest.
    """
    old = {r["target"]: r for r in old_reports if not r.get("dropped")}
    rows = [m.get("calibration") or {} for m in (old_manifest, new_manifest)]
    compared = []
    for report in new_reports:
        target = report["target"]
        if report.get("dropped") or target not in old:
            continue
        before, after = _sections(old[target]), _sections(report)
        for use in after:
            if use in before:
                same_rows = rows[0].get(use) is not None and rows[0].get(use) == rows[1].get(use)
                compared.append(_compare(target, use, before[use], after[use], same_rows))
    return tuple(compared)


def _sections(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return from a bundle's report {use of a data set, a key of the manifest's calibration:
    quality section}."""
    sections = {FIRST: report.get("quality")}
    for prefix, sets in (("also.", "also"), ("adapter.", "adapters")):
        sections |= {f"{prefix}{name}": part for name, part in (report.get(sets) or {}).items()}
    return {use: section for use, section in sections.items() if section}


def _compare(
    target: str, use: str, old: Mapping[str, Any], new: Mapping[str, Any], same_rows: bool
) -> MetricComparison:
    """Compare for a promotion the quality that two bundles' reports give. use: of their data set,
    as in _sections"""
    metric = str(new["metric"])
    where = f"{target}, {metric}" if use == FIRST else f"{target}, {use}, {metric}"
    a, b = (section.get("each") or {} for section in (old, new))
    why, decision = _explain_incomparable(old, new, same_rows), None
    if not why:
        try:
            decision = _TESTS[b["kind"]](a, b, new)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as e:
            why = f"the results for each example cannot be read ({type(e).__name__}: {e})"
    if decision is None:
        message = f"{where}: cannot be told: {why}"
        return MetricComparison(target, metric, "inconclusive", message)
    message = f"{where}: {describe_decision(decision, UNITS.get(b['kind'], ''))}"
    return MetricComparison(
        target, metric, decision.verdict, message, decision.drop, decision.interval
    )


def describe_decision(decision: Decision, unit: str) -> str:
    """Describe, at a promotion, how a metric of the new bundle differs: "better by ...", "worse by
    ..." or "cannot be told: ...", with the interval and the margin. unit: unit of the difference,
    with a space before it."""
    (low, high), drop = decision.interval, decision.drop
    counted = f"{decision.confidence:.0%} on each side, {decision.examples:,} examples"
    if decision.verdict == "pass" and high <= 0:
        if low == high:
            return f"equal on {decision.examples:,} examples"
        return f"better by {-drop:.4f}{unit} ({-high:.4f} to {-low:.4f}; {counted})"
    text = f"worse by {drop:.4f}{unit} ({low:.4f} to {high:.4f}; {counted})"
    if low <= 0:
        moved = f"{'worse' if drop > 0 else 'better'} by {abs(drop):.4f}{unit}" if drop else "equal"
        span = f"{-low:.4f} better to {high:.4f} worse"
        text = f"cannot be told: {moved} ({span}; {counted})"
    margin = {
        "pass": f"within the margin {decision.margin:g}",
        "fail": f"beyond the margin {decision.margin:g}",
        "inconclusive": f"if by less than the margin {decision.margin:g} cannot be told",
    }[decision.verdict]
    needed = f"; about {decision.needed:,} examples would decide" if decision.needed else ""
    return f"{text}, {margin}{needed}"


def _explain_incomparable(old: Mapping[str, Any], new: Mapping[str, Any], same_rows: bool) -> str:
    """Return the reason why a metric's results in two bundles cannot be compared; "" where they
    can."""
    a, b = (section.get("each") or {} for section in (old, new))
    if new["metric"] != old["metric"]:
        return f"its metric is {new['metric']}, and that of the other is {old['metric']}"
    if not same_rows:
        return "the two were measured on different rows"
    if not a or not b or a["kind"] != b["kind"]:
        return f"the two reports lack comparable results of {new['metric']} per example"
    if len(a["candidate"]) != len(b["candidate"]):
        return "the two were measured on different numbers of rows"
    if a.get("truth") != b.get("truth"):
        return "the labels, scores or label numbers of the two differ"
    return ""


def _right(old: Each, new: Each, section: Mapping[str, Any]) -> Decision:
    a, b = (np.array([c == "1" for c in each["candidate"]]) for each in (old, new))
    return _decide(metrics.shares(a, b), len(a), section)


def _labels(old: Each, new: Each, section: Mapping[str, Any]) -> Decision:
    truth, a, b = map(read_labels, (new["truth"], old["candidate"], new["candidate"]))
    if [*map(len, truth)] != [*map(len, a)] or [*map(len, truth)] != [*map(len, b)]:
        raise ValueError("an example has more answers than labels, or fewer")
    if section["metric"] == "f1":
        metric = metrics.f1_metric(truth, a, b, float(section["confidence"]))
    else:
        metric = metrics.word_accuracy(truth, a, b)
    return _decide(metric, len(truth), section)


def _sets(old: Each, new: Each, section: Mapping[str, Any]) -> Decision:
    truth, a, b = (
        metrics.make_indicators(read_labels(texts), int(new["labels"]))
        for texts in (new["truth"], old["candidate"], new["candidate"])
    )
    micro, confidence = section["metric"] == "micro_f1", float(section["confidence"])
    return _decide(metrics.sets_f1(truth, a, b, confidence, micro), len(truth), section)


def _scores(old: Each, new: Each, section: Mapping[str, Any], dimensions: int = 1) -> Decision:
    truth, a, b = (
        _numbers(values, dimensions)
        for values in (new["truth"], old["candidate"], new["candidate"])
    )
    return _decide(metrics.rank_correlation(a, b, truth), len(truth), section)


def _score_lists(old: Each, new: Each, section: Mapping[str, Any]) -> Decision:
    return _scores(old, new, section, dimensions=2)


def _means(old: Each, new: Each, section: Mapping[str, Any]) -> Decision:
    a, b = (_numbers(each["candidate"]) for each in (old, new))
    return decide_by_mean(a - b, float(section["margin"]), float(section["confidence"]))


def _nats(old: Each, new: Each, section: Mapping[str, Any]) -> Decision:
    return _means(new, old, section)  # lower is better: swap the two


def _numbers(values: Sequence[Any], dimensions: int = 1) -> Floats:
    numbers = np.array(values, np.float64)
    if numbers.ndim != dimensions or not np.isfinite(numbers).all():
        raise ValueError("not a list of finite numbers")
    return numbers


def _decide(metric: metrics.Metric, examples: int, section: Mapping[str, Any]) -> Decision:
    return metrics.decide(metric, examples, float(section["margin"]), float(section["confidence"]))


_TESTS: Mapping[str, Callable[[Each, Each, Mapping[str, Any]], Decision]] = {
    "right": _right,
    "labels": _labels,
    "sets": _sets,
    "scores": _scores,
    "score_lists": _score_lists,
    "cosine": _means,
    "nats": _nats,
    "log_likelihood": _means,
    "ndcg": _means,
    "mrr": _means,
    "overlap": _means,
    "recall": _means,
}
"""{kind of a per-example result: its test}."""
