"""Stage `raced`: time forms of a model in turns, in the first cell of validate.latency.

out/race.json   batch, sequence, runs
                systems     {name: {p50, p50_interval, p99, p99_interval}} in ms, end to end;
                            of text-generation between tokens
                to_recipe, to_best   {median, interval} of the candidate's time / the other's, from
                            ratios of single rounds, at the confidence of the last look; null where
                            that one was not timed too
                modules     {module: ms} of the candidate in that cell (measure/module_times.py);
                            null for text-generation and other runtimes than ONNX Runtime on a CPU
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from optimizer import targets
from optimizer.data.datasets import alone, digest, samples
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.bundle import bench
from optimizer.harness.runtimes.machine import this_machine
from optimizer.harness.runtimes.ort.run import OrtRunner, cores
from optimizer.measure import module_times, table
from optimizer.search.stages.sections import Race
from optimizer.store import Stage
from optimizer.timing.stopping_rules import QuantileQuestion, SequentialTest, confidence_of
from optimizer.validate.target_runner import open_onnx
from optimizer.validate.timing.batch_timing import BatchTimer, graph_system, grid
from optimizer.validate.timing.cells import CANDIDATE, CellTimer
from optimizer.validate.timing.generation_timing import GenerationTimer

FILE = "race.json"
RECIPE, BEST = "recipe", "best"
FIGURES = ("p50", "p50_interval", "p99", "p99_interval")


def run(section: Race, base: Path, models: tuple[Path, ...], out: Path) -> None:
    """Time the models. base: folder of load; models: folders of lower, one per system."""
    contract, latency = contracts.read(base / "contract.json"), section.latency
    task = tasks.of(contract)
    encoder = task.inputs.open(base / "checkpoint", contract)
    rows = samples(latency.data) if latency.data else ()
    texts = [alone(row, task) for row in rows] or task.inputs.neutral(contract)
    longest = latency.sequence[0] if task.generates else tasks.longest(contract)
    cell = grid(latency, longest)[0]
    timer: CellTimer = (
        GenerationTimer(contract, encoder, texts, latency, 0)
        if task.generates
        else BatchTimer(texts, latency, 0)
    )
    several = len(section.targets) > 1
    turns = _Turns(section, timer)
    with ExitStack() as opened:
        systems: dict[str, Any] = {}
        for (name, target), model in zip(section.targets.items(), models, strict=True):
            threads = target.intra_op_threads or cores()
            runner = open_onnx(target, model / "model.onnx", contract, threads)
            opened.callback(runner.close)
            systems[name] = runner if task.generates else graph_system(runner, contract, encoder)
        baseline = RECIPE if several else ""
        measured = timer.time(systems, cell, baseline, turns.more if several else None)
        modules = None  # the last runner is the candidate's
        if isinstance(runner, OrtRunner) and runner.provider == "cpu" and not task.generates:
            modules = _modules(runner, table.arrays_of(systems[CANDIDATE], texts, cell))
    (timed,) = measured["cells"]
    times = {name: dict(system[timer.percentiles]) for name, system in timed["systems"].items()}
    document = {
        "batch": cell[0],
        "sequence": cell[1],
        "runs": timed["runs"],
        "systems": {name: {k: end[k] for k in FIGURES} for name, end in times.items()},
        "to_recipe": turns.ratio(RECIPE),
        "to_best": turns.ratio(BEST),
        "modules": modules,
    }
    (out / FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")


def _modules(runner: OrtRunner, arrays: Mapping[str, Any]) -> dict[str, float]:
    rows = module_times.measure(runner, arrays)["modules"]
    return {row["module"]: row["ms"] for row in rows}


class _Turns:
    """Rounds of systems in turns, until the candidate is surely faster or slower than the best (or,
    without it, the recipe), or the time is spent."""

    def __init__(self, section: Race, timer: CellTimer) -> None:
        self._other = BEST if BEST in section.targets else RECIPE
        self._timer, self._times = timer, dict[str, Sequence[Any]]()
        self._rule = SequentialTest(
            QuantileQuestion(50, 1.0),
            section.latency.iterations,
            section.seconds,
            warmup=timer.warmup,
        )

    def more(self, times: Mapping[str, Sequence[Any]]) -> int:
        """Number of rounds to run next."""
        self._times = dict(times)
        return self._rule.more(self._ratios(self._other))

    def _ratios(self, other: str) -> list[float]:
        pairs = zip(self._times[CANDIDATE], self._times[other], strict=True)
        milliseconds = self._timer.milliseconds
        return [milliseconds(ours) / milliseconds(theirs) for ours, theirs in pairs]

    def ratio(self, other: str) -> dict[str, Any] | None:
        """{median, interval} at the confidence of the last look."""
        if other not in self._times:
            return None
        ratios = self._ratios(other)
        confidence = confidence_of(max(len(self._rule.looks), 1))
        interval = bench.percentile_interval(ratios, 50, confidence)
        return {"median": bench.percentile(ratios, 50), "interval": list(interval)}


def files(section: Race) -> dict[str, str]:
    """Digests of the texts and of the code that opens the targets, and the machine."""
    data = section.latency.data
    code = [targets.of(target.runtime).code("open") for target in section.targets.values()]
    return {
        **{name: value for one in code for name, value in one.items()},
        **({"validate.latency.data": digest(data)} if data else {}),
        "machine": this_machine().key,
    }


STAGE = Stage("raced", 2, run, packages=("onnxruntime", "numpy"), files=files, measured=True)
