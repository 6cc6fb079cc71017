"""Stage `raced`: time forms of a model in turns, in the first cell of validate.latency.

out/race.json   batch, sequence, runs
                systems     {name: {p50, p50_interval, p99, p99_interval}} end to end, in ms
                to_recipe, to_best   {median, interval} of the candidate's time / the other's, from
                            ratios of single rounds, at the confidence of the last look; null where
                            that one was not timed too
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from optimizer import targets
from optimizer.data.datasets import alone, digest, samples
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.bundle import bench
from optimizer.harness.runtimes.machine import this_machine
from optimizer.harness.runtimes.ort.run import cores
from optimizer.search.stages.sections import Race
from optimizer.store import Stage
from optimizer.timing.stopping_rules import QuantileQuestion, SequentialTest, confidence_of
from optimizer.validate.target_runner import open_onnx
from optimizer.validate.timing.batch_timing import WARMUP, graph_system, grid

FILE = "race.json"
RECIPE, BEST, CANDIDATE = "recipe", "best", "candidate"


def run(section: Race, base: Path, models: tuple[Path, ...], out: Path) -> None:
    """Time the models. base: folder of load; models: folders of lower, one per system."""
    contract = contracts.read(base / "contract.json")
    task = tasks.of(contract)
    encoder = task.inputs.open(base / "checkpoint", contract)
    data = section.latency.data
    rows = samples(data) if data else ()
    texts = [alone(row, task) for row in rows] or task.inputs.neutral(contract)
    cell = grid(section.latency, tasks.longest(contract))[0]
    rule = _rule(section)
    with ExitStack() as opened:
        systems = {}
        for (name, target), model in zip(section.targets.items(), models, strict=True):
            threads = target.intra_op_threads or cores()
            runner = open_onnx(target, model / "model.onnx", contract, threads)
            opened.callback(runner.close)
            systems[name] = graph_system(runner, contract, encoder)
        measured = bench.measure(
            systems,
            [cell],
            texts,
            iterations=section.latency.iterations,
            warmup=WARMUP,
            baseline=RECIPE,
            more=_more(rule, BEST if BEST in systems else RECIPE) if len(systems) > 1 else None,
        )
    (timed,) = measured["cells"]
    times = {name: system["end_to_end"] for name, system in timed["systems"].items()}
    samples_of = {name: end.pop("samples") for name, end in times.items()}
    confidence = confidence_of(max(len(rule.looks), 1))
    document = {
        **{name: timed[name] for name in ("batch", "sequence", "runs")},
        "systems": times,
        "to_recipe": _ratio(samples_of, RECIPE, confidence),
        "to_best": _ratio(samples_of, BEST, confidence),
    }
    (out / FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")


def _rule(section: Race) -> SequentialTest:
    """Rule that stops where the candidate is surely faster or slower, or the time is spent."""
    question = QuantileQuestion(50, 1.0)
    return SequentialTest(question, section.latency.iterations, section.seconds, warmup=WARMUP)


def _more(rule: SequentialTest, other: str) -> Callable[[Mapping[str, Sequence[float]]], int]:
    """Function from the times so far to the rounds to run next, by ratios to system `other`."""

    def more(times: Mapping[str, Sequence[float]]) -> int:
        pairs = zip(times[CANDIDATE], times[other], strict=True)
        return rule.more([ours / theirs for ours, theirs in pairs])

    return more


def _ratio(
    times: Mapping[str, Sequence[float]], other: str, confidence: float
) -> dict[str, Any] | None:
    if other not in times:
        return None
    ratios = [ours / theirs for ours, theirs in zip(times[CANDIDATE], times[other], strict=True)]
    interval = bench.percentile_interval(ratios, 50, confidence)
    return {"median": bench.percentile(ratios, 50), "interval": list(interval)}


def files(section: Race) -> dict[str, str]:
    """Digests of the texts and of the code that opens the targets, and the machine."""
    machine, data = this_machine(), section.latency.data
    code = [targets.of(target.runtime).code("open") for target in section.targets.values()]
    return {
        **{name: value for one in code for name, value in one.items()},
        **({"validate.latency.data": digest(data)} if data else {}),
        "machine": f"{machine.cpu}, {machine.cores} cores, {machine.gpu}",
    }


STAGE = Stage("raced", 1, run, packages=("onnxruntime", "numpy"), files=files, measured=True)
