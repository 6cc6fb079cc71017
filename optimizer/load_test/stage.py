"""slo: does the bundle's own server keep what the recipe's section of that name says?

The server is started as its user would, with the bundle's own settings (recipe: serve), and asked
by the load test (load_test/) from this machine, whose processors both share. Writes slo.json:
    target    of the engine that answered, as reports name it
    verdict   the worst gate's: pass | fail | inconclusive
    gates     [{name, verdict, measured, limit, interval, message}]
    load      the document of `optimize load`: every run with its percentiles and their intervals

    slo.answered   every answer came and was, in every bit, the one to the same input asked alone;
                   no more than max_refused were refused
    slo.latency, slo.first_token, slo.between
                   the interval of the 99th percentile against its limit in ms, at `rate`
    slo.rate       without a rate: there is one that meets all of them; the highest is reported
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.data.datasets import digest, samples
from optimizer.foundation.verdicts import Verdict, worst
from optimizer.harness.runtimes.machine import this_machine
from optimizer.recipe.serving import Slo
from optimizer.store import Stage
from optimizer.validate.gates import Gate

FILE = "slo.json"
PATIENCE = 60.0  # seconds until an answer is lost, as of `optimize load`


def run(section: Slo, packaged: Path, out: Path) -> None:
    """packaged: of package. Raises InputError for a bundle that does not start, MachineError where
    this machine cannot run it."""
    from optimizer.load_test import measure
    from optimizer.load_test.http_client import HttpClient
    from optimizer.load_test.server import served

    texts = [row.text for row in samples(section.data)] if section.data else []
    come = measure.Arrivals(section.seconds, burst=section.burst)
    objectives = measure.Objectives(section.limits, section.max_refused)
    with served(packaged / "bundle") as server:
        client = HttpClient(server.url, "", section.new_tokens, PATIENCE)
        document = measure.measure(client, texts, come, section.rate, objectives)
    judged = gates(document, section)
    slo = {
        "target": str(server.warmed_up["engine"]),
        "verdict": worst(g.verdict for g in judged),
        "gates": [g.as_dict() for g in judged],
        "load": document,
    }
    (out / FILE).write_text(json.dumps(slo, indent=1), encoding="utf-8")


def gates(document: Mapping[str, Any], section: Slo) -> list[Gate]:
    """Of a load test's document."""
    if section.rate is None:
        return [_highest(document["highest_rate"])]
    (measured,) = document["runs"]
    return [_answered(measured, section), *(_p99(measured, *x) for x in section.limits.items())]


def _highest(highest: Mapping[str, float | None]) -> Gate:
    met, missed = highest["met"], highest["missed"]
    if met is None:
        message = "no rate meets the objectives; loosen them, or serve a smaller model"
        return Gate("slo.rate", "fail", 0.0, None, None, message)
    beyond = f"; {missed:.4g} was not shown to" if missed is not None else ""
    message = f"{met:.4g} requests a second meet the objectives{beyond}"
    return Gate("slo.rate", "pass", met, None, None, message)


def _answered(measured: Mapping[str, Any], section: Slo) -> Gate:
    """wrong, lost: none may be. refused: of all that were sent."""
    share = measured["refused"] / max(measured["sent"], 1)
    bad = measured["wrong"] + measured["lost"]
    verdict: Verdict = "pass" if not bad and share <= section.max_refused else "fail"
    message = (
        f"{measured['sent']} requests at {section.rate:g} a second: {measured['wrong']} answered "
        f"otherwise than alone, {measured['lost']} lost, {share:.2%} refused "
        f"({section.max_refused:.2%} may be)"
    )
    return Gate("slo.answered", verdict, share, section.max_refused, None, message)


def _p99(measured: Mapping[str, Any], kind: str, limit: float) -> Gate:
    from optimizer.load_test import figures, report

    p99 = measured[kind].get("p99")
    verdict = figures.within(p99, limit)
    what = f"p99 of {report.NAMES[kind]}"
    if p99 is None:
        return Gate(f"slo.{kind}", verdict, None, limit, None, f"{what}: nothing was answered")
    value, low, high = p99
    ends = f"{_ms(low)} to {_ms(high)}"
    message = f"{what} is {value:.1f} ms ({ends}) at {measured['rate']:g} requests a second"
    message += f"; {limit:g} ms is asked"
    if verdict == "inconclusive":
        message += "; a longer run has a narrower interval: set slo.seconds to more"
        message += f" ({figures.WINDOWS} times the slowest answer at least)" if low is None else ""
    if verdict == "fail":
        message += "; `optimize tune-serving` finds the settings that do most, or lower slo.rate"
    return Gate(f"slo.{kind}", verdict, value, limit, (low, high), message)


def _ms(end: float | None) -> str:
    return "unknown" if end is None else f"{end:.1f}"


def files(section: Slo) -> Mapping[str, str]:
    """The texts, and the machine: its times are no other machine's."""
    machine = this_machine()
    return {
        **({"slo.data": digest(section.data)} if section.data else {}),
        "machine": f"{machine.cpu}, {machine.cores} cores, {machine.gpu}",
    }


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
        "starlette",
        "uvicorn",
        "uvloop",
    ),
    files=files,
    measured=True,
)
