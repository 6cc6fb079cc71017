"""Stage `raced`: time candidates in turns, in the first cell of section `latency`.

out/race.json   batch, sequence, runs
                systems     {name: {p50, p50_interval, p99, p99_interval}} in ms, end to end;
                            of text-generation between tokens
                to_recipe, to_best   {median, interval} of the candidate's time / the other's:
                            geometric mean of the ratios in several openings, and its interval at
                            the confidence of the last look; null where that one was not timed too
                modules     {module: ms} of the candidate in that cell (measure/module_times.py);
                            null for text-generation and other runtimes than ONNX Runtime on a CPU
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from optimizer import targets
from optimizer.data.datasets import digest_rows, pick_input, read_samples
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.ort.run import OrtRunner, cores
from optimizer.measure import module_times, table
from optimizer.search.stages.sections import Race
from optimizer.store import Stage
from optimizer.timing.stopping_rules import RatioQuestion, SequentialTest, confidence_of
from optimizer.validate.target_runner import open_onnx
from optimizer.validate.timing.batch_timing import BatchTimer, list_cells, make_system
from optimizer.validate.timing.cells import CANDIDATE, CellTimer, TimingComparison
from optimizer.validate.timing.generation_timing import GenerationTimer
from optimizer.validate.timing.openings import Openings

FILE = "race.json"
RECIPE, BEST = "recipe", "best"
FIGURES = ("p50", "p50_interval", "p99", "p99_interval")


def run(section: Race, base: Path, models: tuple[Path, ...], out: Path) -> None:
    """Time models of a search's candidates in turns. base: folder of load; models: folders of
    lower, one per system."""
    contract, latency = contracts.read(base / "contract.json"), section.latency
    task = tasks.look_up(contract)
    encoder = task.inputs.open(base / "checkpoint", contract)
    rows = read_samples(latency.data) if latency.data else ()
    texts = [pick_input(row, task) for row in rows] or task.inputs.neutral(contract)
    longest = latency.sequence[0] if task.generates else tasks.longest(contract)
    cell = list_cells(latency, longest)[0]
    runners = Openings(
        {
            name: partial(
                open_onnx,
                target,
                model / "model.onnx",
                contract,
                target.intra_op_threads or cores(),
            )
            for (name, target), model in zip(section.targets.items(), models, strict=True)
        }
    )
    timer: CellTimer = (
        GenerationTimer(contract, encoder, texts, latency, 0, runners)
        if task.generates
        else BatchTimer(texts, latency, 0, runners)
    )
    question = RatioQuestion.share_rounds(1.0, latency.iterations)
    rule = SequentialTest(question, latency.iterations, section.seconds)
    turns = TimingComparison(timer, rule, BEST if BEST in section.targets else RECIPE)
    with closing(runners):
        runners.open()
        systems: dict[str, Any] = {name: runners.runner(name) for name in section.targets}
        if not task.generates:
            systems = {n: make_system(r.infer, contract, encoder) for n, r in systems.items()}
        if len(systems) > 1:
            measured = timer.time(systems, cell, RECIPE, turns.more, turns.opening)
        else:
            measured = timer.time(systems, cell)
        own, modules = runners.opened(CANDIDATE), None
        if isinstance(own, OrtRunner) and own.provider == "cpu" and not task.generates:
            modules = _modules(own, table.build_arrays(systems[CANDIDATE], texts, cell))
    (timed,) = measured["cells"]
    times = {name: dict(system[timer.percentiles]) for name, system in timed["systems"].items()}
    confidence = confidence_of(max(len(rule.looks), 1))
    document = {
        "batch": cell[0],
        "sequence": cell[1],
        "runs": timed["runs"],
        "systems": {name: {k: end[k] for k in FIGURES} for name, end in times.items()},
        "to_recipe": turns.ratio(RECIPE, confidence) if RECIPE in systems else None,
        "to_best": turns.ratio(BEST, confidence) if BEST in systems else None,
        "modules": modules,
    }
    (out / FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")


def _modules(runner: OrtRunner, arrays: Mapping[str, Any]) -> dict[str, float]:
    rows = module_times.measure(runner, arrays)["modules"]
    return {row["module"]: row["ms"] for row in rows}


def files(section: Race) -> dict[str, str]:
    """Return, for the key of this stage of a search, the digests of the texts and of the code that
    opens the targets, and the machine."""
    data = section.latency.data
    code = [targets.look_up(target.runtime).code("open") for target in section.targets.values()]
    return {
        **{name: value for one in code for name, value in one.items()},
        **({"validate.latency.data": digest_rows(data)} if data else {}),
        "machine": describe_machine().key,
    }


STAGE = Stage("raced", 2, run, packages=("onnxruntime", "numpy"), files=files, measured=True)
