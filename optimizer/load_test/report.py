"""Format the document of a load test as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optimizer.load_test.figures import PERCENTILES, TIMES

NAMES = {"latency": "latency", "first_token": "first token", "between": "between tokens"}


def format_document(document: Mapping[str, Any]) -> str:
    """Write the text of a load test: every run, then the highest rate, the cost and the verdict."""
    lines = [f"{document['model']} at {document['url']}, {document['requests']}"]
    for run in document["runs"]:
        lines += ["", *_run(run)]
    lines.append("")
    highest = document.get("highest_rate")
    if highest:
        lines.append(_highest(highest, document["least_rate"]))
    if "cost_per_1000" in document:
        lines.append(f"{document['cost_per_1000']:.6g} per 1,000 requests at that rate")
    if document.get("objectives"):
        limits = ", ".join(
            f"p99 of {NAMES[kind]} within {limit:g} ms"
            for kind, limit in document["objectives"].items()
        )
        lines.append(f"objectives ({limits}): {document['verdict']}")
    return "\n".join(lines)


def _highest(highest: Mapping[str, float | None], least: float) -> str:
    met, missed = highest["met"], highest["missed"]
    if met is None:
        return (
            f"no rate of {least:.4g} a second or more met the objectives; lower rates were not "
            "tried, because they need longer runs: increase --seconds"
        )
    beyond = f"; {missed:.4g} was not shown to meet them" if missed is not None else ""
    return f"{met:.4g} requests a second met the objectives{beyond}"


def _run(run: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{run['rate']:.4g} requests a second for {run['seconds']:g} s ({run['arrivals']}): "
        f"{run['sent']} sent, {run['answered']} answered, {run['refused']} refused, "
        f"{run['wrong']} wrong, {run['lost']} lost: {run['verdict']}",
        f"  {run['throughput']:.4g} answered a second, {run['goodput']:.4g} within the objectives; "
        f"99 % were sent at most {run['client_late_ms']:.2f} ms after they were due",
    ]
    names = [f"p{percent:g}" for percent in PERCENTILES]
    for kind in (*TIMES, "refused_in"):
        if run[kind]:
            each = "   ".join(f"{n} {_interval(run[kind][n])}" for n in names)
            lines.append(f"  {NAMES.get(kind, 'refused in')}, ms: {each}")
    return lines


def _interval(value: list[float | None]) -> str:
    middle, low, high = ("?" if v is None else f"{v:.1f}" for v in value)
    return f"{middle} [{low}, {high}]"
