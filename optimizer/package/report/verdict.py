"""Verdict of a report in sentences for readers outside the field."""

from __future__ import annotations

from typing import Any

from optimizer.package.report.cards import generation, vectors
from optimizer.package.report.comparison import (
    Document,
    baseline,
    explain_missing,
    get_part,
    get_parts,
    name_candidate,
)
from optimizer.package.report.figures import (
    change,
    finite,
    interval,
    nats,
    plain,
    times,
    title,
    whole,
)


def counts(report: Document) -> str:
    """Count the verdicts of a report's gates: "all 6 gates passed", "of 6 gates, 2 failed and 1
    undecided", "3 gates passed, 1 not measured here"."""
    gates = [str(g.get("verdict")) for g in get_parts(report, "gates")]
    if not gates:
        return "no gate was judged"
    bad = {v: gates.count(v) for v in gates if v != "pass"}
    if not bad:
        return f"all {len(gates)} gates passed" if len(gates) > 1 else "the one gate passed"
    if set(bad) == {"not measured"}:
        return f"{gates.count('pass')} gates passed, {bad['not measured']} not measured here"
    words = {"fail": "failed", "inconclusive": "undecided"}
    return f"of {len(gates)} gates, " + " and ".join(
        f"{n} {words.get(v, v)}" for v, n in sorted(bad.items())
    )


def write_verdict(report: Document, recipe: Any) -> str:
    """Write the report's verdict: the recommendation and the changes in numbers."""
    verdict = str(report.get("verdict"))
    unmeasured = any(g.get("verdict") == "not measured" for g in get_parts(report, "gates"))
    opening = {
        "pass": "Good as far as this machine can tell" if unmeasured else "Good to ship",
        "fail": "Do not ship",
        "inconclusive": "Not decided",
    }.get(verdict, f"Unknown verdict {verdict!r}")
    if report.get("dropped"):
        opening = "Not in the bundle (on_fail: drop)"
    sentences = [
        f"{opening}: {counts(report)}.",
        _quality(report),
        _speed(report, recipe),
        _size(report),
        vectors.describe_forms(report),
    ]
    return " ".join(s for s in sentences if s)


def _quality(report: Document) -> str:
    """Write the sentence of the report's verdict on the difference in quality, or why it was not
    measured."""
    section = get_part(report, "quality")
    if not section.get("metric"):
        return f"Quality was not measured: {explain_missing(report, 'quality')}."
    if generation.is_generation(report):
        return _text_cost(report, section)
    metric, moved = str(section["metric"]), get_part(section, "difference")
    write = change(metric)
    text = f"{title(metric)} changed by {write(moved.get('value'))}"
    bounds = interval(moved.get("interval"), write)
    text += f" (interval {bounds})" if bounds else ""
    margin = finite(section.get("margin"))
    if margin is not None:
        text += f"; a drop of up to {write(margin).removeprefix('+')} was allowed"
    needed = section.get("needed")
    return f"{text}." + (f" {whole(needed)} examples would decide." if needed is not None else "")


def _text_cost(report: Document, section: Document) -> str:
    before, after = (plain(get_part(section, k).get("value")) for k in ("baseline", "candidate"))
    value, bounds = generation.cost(report)
    span = interval(bounds, nats)
    text = f"Perplexity went from {before} to {after}: held-out text costs {nats(value)} more"
    text += f" (interval {span})" if span else ""
    margin = finite(section.get("margin"))
    text += f"; up to {nats(margin).removeprefix('+')} was allowed." if margin is not None else "."
    needed = section.get("needed")
    return text + (f" {whole(needed)} windows would decide." if needed is not None else "")


def _speed(report: Document, recipe: Any) -> str:
    """Write the sentence of the report's verdict on the time relative to float, or why it was not
    measured."""
    cells = get_parts(get_part(report, "speed"), "cells")
    if not cells:
        return f"Speed was not measured: {explain_missing(report, 'speed')}."
    ratios = [finite(get_part(c, "ratio").get("median")) for c in cells]
    if generation.is_generation(report):
        ratios = [
            finite(get_part(get_part(c, "ratio"), "inter_token").get("median")) for c in cells
        ]
    known = [r for r in ratios if r is not None]
    if not known or baseline(cells[0], str(report.get("target", ""))) is None:
        return "The time relative to float is not known."
    low, high = min(known), max(known)
    span = times(low) if times(low) == times(high) else f"{times(low)} to {times(high)}"
    pace = "faster" if high < 1 else "slower" if low > 1 else "not clearly faster"
    name = name_candidate(recipe)
    name = name.capitalize() if name.islower() else name
    return f"{name} takes {span} the time of float ({pace})."


def _size(report: Document) -> str:
    section = get_part(get_part(report, "speed"), "size") or get_part(report, "size")
    before, after = (finite(section.get(k)) for k in ("float_bytes", "candidate_bytes"))
    if not before or after is None:
        return ""
    return f"Its file is {100 * after / before:.0f} % of the float one."
