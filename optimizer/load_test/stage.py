"""Stage `slo`: load test of the bundle's own server against the recipe's section of that name.

The server is started as a user would, with the bundle's own settings (recipe: serve). The client
runs on this machine, and both share its processors. Writes slo.json:
    target    name of the engine that answered, as in reports
    verdict   the worst gate's: pass | fail | inconclusive
    gates     [{name, verdict, measured, limit, interval, message}]
    load      document of `optimize load`: every run with its percentiles and their intervals

    slo.answered   every answer came, with the same bits as the answer to the same input sent
                   alone; at most the share max_refused was refused
    slo.latency, slo.first_token, slo.between
                   interval of the 99th percentile against its limit in ms, at `rate`
    slo.rate       without a rate: some rate meets all of them; the highest is reported
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.data.datasets import digest_rows, read_samples
from optimizer.foundation.verdicts import Verdict, worst
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.load_test import highest_rate
from optimizer.recipe.serving import Slo
from optimizer.store import Estimate, Stage
from optimizer.validate.gates import Gate

FILE = "slo.json"
PATIENCE = 60.0  # seconds until a request times out, as in `optimize load`


def run(section: Slo, packaged: Path, out: Path) -> None:
    """Test the bundle's server under load, and write slo.json. packaged: folder of stage package,
    which holds bundle/. Raises InputError for a bundle that does not start, MachineError where this
    machine cannot run it."""
    from optimizer.load_test import measure
    from optimizer.load_test.http_client import HttpClient
    from optimizer.load_test.server import run_server

    texts = [row.text for row in read_samples(section.data)] if section.data else []
    schedule = measure.Schedule(section.seconds, burst=section.burst)
    objectives = measure.Objectives(section.limits, section.max_refused)
    with run_server(packaged / "bundle") as server:
        client = HttpClient(server.url, "", section.new_tokens, PATIENCE)
        document = measure.measure(client, texts, schedule, section.rate, objectives)
    judged = judge_run(document, section)
    slo = {
        "target": str(server.warmed_up["engine"]),
        "verdict": worst(g.verdict for g in judged),
        "gates": [g.as_dict() for g in judged],
        "load": document,
    }
    (out / FILE).write_text(json.dumps(slo, indent=1), encoding="utf-8")


def judge_run(document: Mapping[str, Any], section: Slo) -> list[Gate]:
    """Return the gates of a load test; document: result of measure.measure."""
    if section.rate is None:
        return [_rate_gate(document["highest_rate"])]
    (run,) = document["runs"]
    return [_answered_gate(run, section), *(_p99_gate(run, *x) for x in section.limits.items())]


def _rate_gate(highest: Mapping[str, Any]) -> Gate:
    met, missed = highest["met"], highest["missed"]
    if met is None and highest["undecided"]:
        message = f"a run at {missed:.4g} requests a second does not decide; increase slo.seconds"
        return Gate("slo.rate", "inconclusive", None, None, None, message)
    if met is None:
        message = "no rate meets the objectives; loosen them, or serve a smaller model"
        return Gate("slo.rate", "fail", 0.0, None, None, message)
    beyond = f"; {missed:.4g} was not shown to meet them" if missed is not None else ""
    message = f"{met:.4g} requests a second meet the objectives{beyond}"
    return Gate("slo.rate", "pass", met, None, None, message)


def _answered_gate(run: Mapping[str, Any], section: Slo) -> Gate:
    """Return the load test's gate that fails for any wrong or lost answer, or too large a share of
    refusals."""
    share = run["refused"] / max(run["sent"], 1)
    bad = run["wrong"] + run["lost"]
    verdict: Verdict = "pass" if not bad and share <= section.max_refused else "fail"
    message = (
        f"{run['sent']} requests at {section.rate:g} a second: {run['wrong']} answers differ from "
        f"those to the same input sent alone, {run['lost']} lost, {share:.2%} refused "
        f"(allowed: {section.max_refused:.2%})"
    )
    return Gate("slo.answered", verdict, share, section.max_refused, None, message)


def _p99_gate(run: Mapping[str, Any], kind: str, limit: float) -> Gate:
    from optimizer.load_test import figures, report

    p99 = run[kind].get("p99")
    verdict = figures.judge_percentile(p99, limit)
    what = f"p99 of {report.NAMES[kind]}"
    if p99 is None:
        message = f"{what} is unknown: no request was answered"
        return Gate(f"slo.{kind}", verdict, None, limit, None, message)
    value, low, high = p99
    ends = f"{_ms(low)} to {_ms(high)}"
    message = f"{what} is {value:.1f} ms ({ends}) at {run['rate']:g} requests a second"
    message += f"; the limit is {limit:g} ms"
    if verdict == "inconclusive":
        message += "; a longer run has a narrower interval: increase slo.seconds"
        message += f" (at least {figures.WINDOWS} times the slowest answer)" if low is None else ""
    if verdict == "fail":
        message += "; find better settings with `optimize tune-serving`, or lower slo.rate"
    return Gate(f"slo.{kind}", verdict, value, limit, (low, high), message)


def _ms(end: float | None) -> str:
    return "unknown" if end is None else f"{end:.1f}"


def digest_inputs(section: Slo) -> Mapping[str, str]:
    """Return what the load test's key depends on beside its section: the digest of the texts, and
    the key of this machine, because times are valid only on it."""
    return {
        **({"slo.data": digest_rows(section.data)} if section.data else {}),
        "machine": describe_machine().key,
    }


def estimate(section: Slo, _shapes: Any) -> Estimate:
    """Predict the time of the load test: the seconds of one run, or of the most runs that a search
    makes."""
    runs = highest_rate.RUNS[1] if section.rate is None else 1
    return Estimate(seconds=runs * section.seconds)


STAGE = Stage(
    "slo",
    1,
    run,
    packages=(
        "aiohttp",
        "h11",
        "numpy",
        "onnxruntime",
        "openvino",
        "orjson",
        "starlette",
        "uvicorn",
        "uvloop",
    ),
    files=digest_inputs,
    estimate=estimate,
    measured=True,
)
