"""Recommend shapes, the cells of `validate.latency` and the rate of `slo` for some requests."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from optimizer.foundation.progress import say
from optimizer.harness.bounds import fewest
from optimizer.measure import table
from optimizer.recipe.serving import Slo, solve_mean_requests
from optimizer.traffic.buckets import Buckets, Cost, interpolate_times
from optimizer.traffic.requests import Traffic

WINDOW = 60.0  # seconds of the window whose rate is recommended; a choice
PERCENTILES = (50, 90, 99)
Value = TypeVar("Value", int, float)


def quantile(counts: Mapping[Value, float], percent: float) -> Value:
    """Compute a quantile of users' requests: the smallest value that `percent` % of the weight do
    not exceed."""
    values = sorted(counts)
    share = np.cumsum([counts[v] for v in values]) / sum(counts.values())
    return values[int(np.argmax(share >= percent / 100 - 1e-12))]


def measure_rates(instants: Sequence[float]) -> dict[str, float] | None:
    """Return {"mean", "busiest", "window"} of users' requests from ascending arrival times in
    seconds.

    mean, busiest: requests per second, over all the time and over the busiest `window` seconds

    None for fewer than two distinct instants.
    """
    span = instants[-1] - instants[0] if instants else 0.0
    if not span:
        return None
    window = min(WINDOW, span)
    most = max(bisect_left(instants, t + window) - i for i, t in enumerate(instants))
    return {"mean": (len(instants) - 1) / span, "busiest": most / window, "window": window}


def choose_cost(traffic: Traffic, times: tuple[Path, Path | None] | None) -> tuple[Cost, str]:
    """Choose the cost by which lengths for users' requests are recommended: (function from a row's
    length to its cost, origin of the costs in words).

    Costs are the measured times of a table or, with times=None, the number of tokens.

    times: file of the table, and the public key that must have signed it, or None
    """
    if times is None:
        return float, "the number of tokens"
    file, key = times
    measured = table.read(file, key)
    of = measured.get("bundle", {}).get("name", traffic.model)
    if traffic.model and of != traffic.model:
        say(f"warning: {file} has the times of {of}, and the requests are to {traffic.model}")
    batch = quantile(traffic.batches, 50) if traffic.batches else 1
    return interpolate_times(measured["cells"], batch, str(file)), f"the times of {file}"


def build_document(
    traffic: Traffic, choices: Sequence[Buckets], costs: str, where: str
) -> dict[str, Any]:
    """Return the document of `--json`: recommended shapes, latency cells and rate.

    choices: best buckets of each number of buckets
    costs: origin of the costs, in words
    where: name of the file with the requests
    """
    rows, lengths, batches = sum(traffic.lengths.values()), traffic.lengths, traffic.batches
    largest = max(batches, default=1)
    typical = quantile(batches, 50) if batches else 1
    edges = choices[-1].lengths
    starts = (1, *(edge + 1 for edge in edges))
    latency: dict[str, Any] = {
        "batch": sorted({quantile(batches, p) for p in (50, 99)} if batches else {1}),
        "sequence": sorted({quantile(lengths, p) for p in (50, 99)}),
    }
    if traffic.new_tokens:
        latency["new_tokens"] = max(round(float(np.median(traffic.new_tokens))), 1)
    spans = [{"sequence": [low, edge, edge]} for low, edge in zip(starts, edges, strict=False)]
    shapes: dict[str, Any] = {"batch": [1, typical, largest], "sequence": [1, edges[-1], edges[-1]]}
    if len(spans) > 1:
        shapes["buckets"] = spans
    return {
        "requests": where,
        "model": traffic.model or None,
        "rows": rows,
        "tokens": {f"p{p}": quantile(lengths, p) for p in PERCENTILES} | {"max": max(lengths)},
        "rows_per_run": {f"p{p}": quantile(batches, p) for p in PERCENTILES} | {"max": largest}
        if batches
        else None,
        "left_out": dict(traffic.left_out),
        "costs": costs,
        "buckets": [{"lengths": list(b.lengths), "cost": b.cost} for b in choices],
        "shapes": shapes,
        "latency": latency,
        "rate": measure_rates(traffic.instants),
        "slo": _slo(traffic),
    }


def _slo(traffic: Traffic) -> dict[str, float] | None:
    """Return the recipe's section `slo` for these requests; None without instants or times.

    rate: requests per second in the busiest window
    p99_ms: 99th percentile of the recorded times
    seconds: length of a run that can bound a 99th percentile at this rate
    """
    rate = measure_rates(traffic.instants)
    if rate is None or not traffic.milliseconds:
        return None
    busiest = max(float(f"{rate['busiest']:.4g}"), 0.01)
    default = Slo.model_fields["seconds"].default
    seconds = max(default, math.ceil(solve_mean_requests(fewest(99)) / busiest))
    p99 = quantile(Counter(traffic.milliseconds), 99)
    return {"rate": busiest, "p99_ms": p99, "seconds": seconds}


def format_document(document: Mapping[str, Any]) -> str:
    """Write what the traffic recommends as a YAML fragment for a recipe, whose comments have the
    figures."""
    of_model = f" to {document['model']}" if document["model"] else ""
    lines = [
        f"# {document['rows']:,.0f} rows{of_model} in {document['requests']}",
        f"# tokens per row: {_figures(document['tokens'])}",
    ]
    if document["rows_per_run"]:
        lines.append(f"# rows per run of the model: {_figures(document['rows_per_run'])}")
    lines += [f"# left out: {count:,} {what}" for what, count in document["left_out"].items()]
    lines.append(f"# Cost of padding, by {document['costs']}, / the cost without padding:")
    for choice in document["buckets"]:
        lines.append(f"#   {choice['cost']:6.3f}  {', '.join(map(str, choice['lengths']))}")
    longest = document["buckets"][-1]["lengths"][-1]
    lines += [
        f"# For targets tensorrt and tensorrt-rtx, which then refuse more than {longest} tokens:",
        f"#   shapes: {_flow(document['shapes'])}",
        "validate:",
        f"  latency: {_flow(document['latency'])}",
    ]
    slo, rate = document["slo"], document["rate"]
    if slo is None:
        lacking = "two different arrival times" if rate is None else "times of answers"
        return "\n".join([*lines, f"# No slo: {document['requests']} lacks {lacking}."])
    return "\n".join(
        [
            *lines,
            "slo:",
            f"  rate: {slo['rate']:g}  # the busiest {rate['window']:.3g} s; on average "
            f"{rate['mean']:.4g}",
            f"  p99_ms: {slo['p99_ms']:g}  # DECIDE: 99 % of these requests took at most this",
            f"  seconds: {slo['seconds']:g}",
        ]
    )


def _figures(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in values.items())


def _flow(value: Any) -> str:
    """Format a value of the recommended recipe in YAML's flow style."""
    return json.dumps(value).replace('"', "")
