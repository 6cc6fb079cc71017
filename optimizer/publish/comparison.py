"""Is one bundle worse than another? By what each did on the same examples, kept in its report.

The test is the one that the bundle had to pass against its float model (validate/quality/
significance.py), at the new bundle's own margin and confidence; the other bundle takes the place of
the float model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimizer.validate.quality.significance import Decision, paired_mean, paired_outcomes
from optimizer.verdicts import Verdict


@dataclass(frozen=True)
class Comparison:
    """target, metric; pass where the new one is not worse; the reason."""

    target: str
    metric: str
    verdict: Verdict
    message: str


def compare(
    old_manifest: Mapping[str, Any],
    old_reports: Sequence[Mapping[str, Any]],
    new_manifest: Mapping[str, Any],
    new_reports: Sequence[Mapping[str, Any]],
) -> tuple[Comparison, ...]:
    """One for each target and metric that both bundles have. Examples are the same when their
    data set has the same digest."""
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
                compared.append(_compare(target, before[use], after[use], same_rows))
    return tuple(compared)


def _sections(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """{use of a data set, as the manifest's calibration names it: a quality section}."""
    also = {f"also.{name}": part for name, part in (report.get("also") or {}).items()}
    return {use: s for use, s in {"validate": report.get("quality"), **also}.items() if s}


def _compare(
    target: str, old: Mapping[str, Any], new: Mapping[str, Any], same_rows: bool
) -> Comparison:
    metric = str(new["metric"])
    a, b = (section.get("each") or {} for section in (old, new))
    why = ""
    if metric != old["metric"]:
        why = f"it was judged by {metric}, and the other by {old['metric']}"
    elif not same_rows:
        why = "the two were judged on different rows"
    elif not a or not b or a["kind"] != b["kind"]:
        why = f"{metric} has no result for each example in both reports"
    elif len(a["candidate"]) != len(b["candidate"]):
        why = "the two were judged on different numbers of rows"
    if why:
        return Comparison(target, metric, "inconclusive", f"{target}, {metric}: {why}")
    decision = _decide(a, b, float(new["margin"]), float(new["confidence"]))
    low, high = decision.interval
    message = (
        f"{target}, {metric}: lower by {decision.drop:.4f} ({low:.4f} to {high:.4f}) on "
        f"{decision.examples} examples, margin {decision.margin}"
    )
    if decision.needed:
        message += f"; about {decision.needed} examples would decide"
    return Comparison(target, metric, decision.verdict, message)


def _decide(
    old: Mapping[str, Any], new: Mapping[str, Any], margin: float, confidence: float
) -> Decision:
    if new["kind"] == "right":
        a, b = (np.array([c == "1" for c in each["candidate"]]) for each in (old, new))
        return paired_outcomes(a, b, margin, confidence)
    a, b = (np.array(each["candidate"], np.float64) for each in (old, new))
    drops = b - a if new["kind"] == "nats" else a - b  # fewer nats are better
    return paired_mean(drops, margin, confidence)
