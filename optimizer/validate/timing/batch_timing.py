"""Time the candidate and its float baselines in turns: torch, and every float form of the same
runtime that the machine offers (float_forms.py). For tasks that answer a batch in one forward pass.

All systems answer the same texts in one run, with the same number of threads, through the harness's
own code (harness.bundle.bench). Gates:

    speed.must_beat_float   time of the candidate / time of the fastest accurate float form, in
                            every cell: an interval wholly below 1 passes, wholly at or above 1
                            fails
    speed.p99_ms            interval of the 99th percentile in the first cell, against the limit
    speed.latency_gain      see latency_gain.py

Timing continues until each gate is decided, within latency.max_seconds: timing/stopping_rules.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimizer.foundation.progress import say
from optimizer.harness import tasks
from optimizer.harness.bundle import bench
from optimizer.harness.bundle.bench import System
from optimizer.harness.contract import Contract
from optimizer.harness.runtimes.ort.run import cores
from optimizer.harness.runtimes.runner import Runner
from optimizer.recipe.schema import Latency, TargetSection
from optimizer.timing.stopping_rules import QuantileQuestion, SequentialTest, TimeBudget
from optimizer.validate import target_runner
from optimizer.validate.gates import UNMEASURED, Gate
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.breach import breach
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.timing.float_forms import FloatForms, list_forms

CANDIDATE, BASELINE, TORCH = "candidate", "onnxruntime-float", "torch-float"
WARMUP = 5  # rounds: ONNX Runtime compares its ways to split a batch in them (divided.RUNS)


def measure(
    m: RunArtifacts, texts: Sequence[Any], floats: FloatForms | None = None
) -> dict[str, Any]:
    """Measure the report's `speed` section of a target that runs on this machine. floats: float
    forms; None: the result of list_forms."""
    latency, target = m.section.validate_.latency, m.section.target
    floats = floats or list_forms(m)
    threads = target.intra_op_threads or cores()
    cells = grid(latency, tasks.longest(m.contract))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    count = f"{len(cells)} cells of {2 + len(floats.sections)} systems"
    say(f"validate: timing {count}, {latency.iterations} rounds or more")
    systems = {TORCH: torch_system(m.reference_model, m.contract, m.encoder)}
    try:
        with ExitStack() as opened:
            for name, (section, model) in _files(m, floats).items():
                runner = target_runner.open_onnx(section, model, m.contract, threads)
                opened.callback(runner.close)
                systems[name] = graph_system(runner, m.contract, m.encoder)
            timing = Timing(latency, threads, count_questions(latency, len(cells), m.gains))
            measured = _timed(systems, cells, texts, timing, floats.compared)
    finally:
        torch.set_num_threads(before)
    if floats.figures:
        measured["floats"] = dict(floats.figures)
    measured["peak_memory"] = peak_memory(m, floats, cells[0], threads)
    measured["size"] = {
        "float_bytes": size(m.reference_graph, "model.onnx"),
        "candidate_bytes": size(m.model, "model.onnx"),
    }
    return measured


def _files(m: RunArtifacts, floats: FloatForms) -> dict[str, tuple[TargetSection, Path]]:
    """{name: (section that runs it, ONNX file)} of every system but torch."""
    graph = m.reference_graph / "model.onnx"
    forms = {name: (section, graph) for name, section in floats.sections.items()}
    return {**forms, CANDIDATE: (m.section.target, m.model / "model.onnx")}


def grid(latency: Latency, longest: int) -> list[tuple[int, int]]:
    """List the cells (batch, sequence) to time, each once. A sequence longer than the model takes
    (`longest`) is truncated, so its cell has the truncated length."""
    lengths = dict.fromkeys(min(length, longest) for length in latency.sequence)
    return [(batch, length) for batch in latency.batch for length in lengths]


@dataclass(frozen=True)
class Timing:
    """Settings of one timing run.

    threads: number of threads of each system
    questions: number of questions that share latency.max_seconds (see count_questions)
    """

    latency: Latency
    threads: int
    questions: int


def _timed(
    systems: Mapping[str, System],
    cells: Sequence[tuple[int, int]],
    texts: Sequence[Any],
    timing: Timing,
    floats: Sequence[str],
) -> dict[str, Any]:
    """Time every cell until its gate is decided, then the candidate alone for its 99th percentile.
    floats: names of the float forms; the candidate is compared with the fastest of them."""
    latency, threads = timing.latency, timing.threads
    budget = TimeBudget(latency.max_seconds, timing.questions)
    section: dict[str, Any] = {}
    for cell in cells:
        stopping, baseline = None, _fastest(systems, floats, cell, texts, timing)
        if latency.must_beat_float:
            stopping = budget.test(QuantileQuestion(50, 1.0), latency.iterations, WARMUP)
        measured = bench.measure(
            systems,
            [cell],
            texts,
            iterations=latency.iterations,
            warmup=WARMUP,
            threads=threads,
            baseline=baseline,
            more=_ratios(stopping, baseline) if stopping else None,
            beside={TORCH},
        )
        if stopping:
            measured["cells"][0]["ratio"] |= stopping.as_dict()
        section = {**measured, "cells": [*section.get("cells", ()), *measured["cells"]]}
    if latency.p99_ms is not None:
        stopping = budget.test(QuantileQuestion(99, latency.p99_ms), latency.iterations, WARMUP)
        measured = bench.measure(
            {CANDIDATE: systems[CANDIDATE]},
            cells[:1],
            texts,
            iterations=latency.iterations,
            warmup=WARMUP,
            threads=threads,
            more=lambda times: stopping.more(times[CANDIDATE]),
        )
        section["p99"] = with_p99_interval(
            measured["cells"][0]["systems"][CANDIDATE]["end_to_end"], stopping
        )
    return section


def _fastest(
    systems: Mapping[str, System],
    names: Sequence[str],
    cell: tuple[int, int],
    texts: Sequence[Any],
    timing: Timing,
) -> str:
    """Name of the fastest of the systems `names` in `cell`, by rounds that no gate uses."""
    if len(names) == 1:
        return names[0]
    measured = bench.measure(
        {name: systems[name] for name in names},
        [cell],
        texts,
        iterations=timing.latency.iterations,
        warmup=WARMUP,
        threads=timing.threads,
    )
    timed = measured["cells"][0]["systems"]
    return min(names, key=lambda name: float(timed[name]["end_to_end"]["p50"]))


def _ratios(
    stopping: SequentialTest, baseline: str
) -> Callable[[Mapping[str, Sequence[float]]], int]:
    def more(times: Mapping[str, Sequence[float]]) -> int:
        pairs = zip(times[CANDIDATE], times[baseline], strict=True)
        return stopping.more([candidate / other for candidate, other in pairs])

    return more


def count_questions(latency: Latency, cells: int, gain: bool = False) -> int:
    """Count the questions that share the time. gain: True where a latency gain is one of them."""
    return cells * latency.must_beat_float + (latency.p99_ms is not None) + gain


def with_p99_interval(percentiles: Mapping[str, Any], test: SequentialTest) -> dict[str, Any]:
    """Copy of `percentiles` with the interval of the 99th, by which the gate is judged."""
    fields = test.as_dict()
    return {**percentiles, **fields, "p99_interval": fields.pop("interval")}


def graph_system(runner: Runner, contract: Contract, encoder: Any) -> System:
    """The three steps of a bundle: pre-processing, forward pass, post-processing."""
    return System(
        pre=lambda texts, length: tasks.encode(contract, encoder, texts, None, length),
        forward=runner.infer,
        post=lambda outputs, batch: tasks.decode(contract, outputs, batch),
        lengthen=tasks.of(contract).inputs.lengthen,
    )


def torch_system(model: nn.Module, contract: Contract, encoder: Any) -> System:
    """The steps of `graph_system` around the reference model in torch."""
    names = [o.name for o in contract.outputs]
    return System(
        pre=lambda texts, length: tasks.encode(contract, encoder, texts, None, length),
        forward=lambda batch: trace.run(model, batch, names),
        post=lambda outputs, batch: tasks.decode(contract, outputs, batch),
        lengthen=tasks.of(contract).inputs.lengthen,
    )


def size(folder: Path, name: str) -> int:
    """Bytes of an ONNX model, external weights included."""
    return sum(f.stat().st_size for f in (folder / name, folder / f"{name}.data") if f.is_file())


def peak_memory(
    m: RunArtifacts, floats: FloatForms, cell: tuple[int, int], threads: int
) -> dict[str, int]:
    """Peak resident bytes, per system, of a fresh process that answers one batch."""
    batch, sequence = cell
    shared = (
        "import json\nfrom pathlib import Path\nimport numpy as np\n"
        f"inputs = {_shapes(m.contract, batch, sequence)!r}\n"
        "batch = {n: np.ones(shape, kind) for n, (shape, kind) in inputs.items()}\n"
    )

    def served_file(section: TargetSection, model: Path) -> str:
        entry = json.dumps(target_runner.manifest_entry(section, model))
        return shared + (
            "from optimizer.harness.bundle.engines import Workshop\n"
            "from optimizer.harness.runtimes.machine import this_machine\n"
            f"entry = json.loads({entry!r})\n"
            "shop = Workshop(Path('.'), {'files': {}}, this_machine(), None)\n"
            f"shop.open(entry, 'load', {threads}).infer(batch)\n"
        )

    in_torch = shared + (
        "from optimizer.model.checkpoint.checkpoint import open_checkpoint\n"
        "from optimizer.model.checkpoint.model import torch_model\n"
        "from optimizer.validate.ledger.trace import run\n"
        f"model = torch_model(open_checkpoint(Path({str(m.reference)!r})), {m.task!r})\n"
        f"run(model, batch, {m.outputs!r})\n"
    )
    programs = {name: served_file(*file) for name, file in _files(m, floats).items()}
    return {n: bench.peak_memory(code) for n, code in {TORCH: in_torch, **programs}.items()}


def _shapes(
    contract: Contract, batch: int, sequence: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """{input: (shape, type)} of a batch."""
    sizes = {"batch": batch, "sequence": sequence}
    return {
        i.name: (tuple(sizes[a] if isinstance(a, str) else a for a in i.axes), i.dtype)
        for i in contract.inputs
    }


def gates(section: Mapping[str, Any], latency: Latency, inspected: Mapping[str, Any]) -> list[Gate]:
    verdicts = []
    if latency.must_beat_float:
        cells = section["cells"]
        ratios = [(f"batch {c['batch']}, sequence {c['sequence']}", c["ratio"]) for c in cells]
        shared = count_questions(latency, len(cells), "gain" in section)
        verdicts.append(beats_float(ratios, lambda i: why_slow(cells[i], inspected), shared=shared))
    if latency.p99_ms is not None:
        first = section["cells"][0]["systems"][CANDIDATE]["end_to_end"]
        percentiles = section.get("p99", first)
        shared = count_questions(latency, len(section["cells"]), "gain" in section)
        verdicts.append(within(percentiles, latency.p99_ms, "p99 end to end", shared))
    return verdicts


def unmeasured(latency: Latency, why: str, gain: tuple[str, float] | None = None) -> list[Gate]:
    """The recipe's speed gates where nothing could be timed: neither passed nor left out. gain:
    name and limit of the gate of a latency gain."""
    declared = [("speed.must_beat_float", 1.0)] if latency.must_beat_float else []
    if latency.p99_ms is not None:
        declared.append(("speed.p99_ms", latency.p99_ms))
    declared += [gain] if gain else []
    return [Gate(name, UNMEASURED, None, limit, None, why) for name, limit in declared]


def beats_float(
    cells: Sequence[tuple[str, Mapping[str, Any]]],
    why: Callable[[int], str],
    what: str = "time",
    shared: int = 1,
) -> Gate:
    """Judge must_beat_float by the worst cell, whose interval reaches highest.

    cells: (place, ratio to float with its interval) per cell
    why: explanation of the i-th cell where it is slower
    what: name of the time in the message
    shared: see would_decide
    """
    intervals = [ratio["interval"] for _, ratio in cells]
    worst = max(range(len(cells)), key=lambda i: _upper(intervals[i]))
    verdict = "pass" if _upper(intervals[worst]) < 1 else "inconclusive"
    if any(low is not None and low >= 1 for low, _ in intervals):
        verdict = "fail"
        worst = max(range(len(cells)), key=lambda i: intervals[i][0] or 0.0)
    where, comparison = cells[worst]
    ratio = comparison["median"]
    message = (
        f"{breach(ratio, 1.0)[0]} times the {what} of {comparison.get('to', BASELINE)} at {where}"
    )
    if verdict == "inconclusive":
        message += would_decide(comparison, shared, "so near 1")
    if verdict == "fail":
        message += f"; {why(worst)}"
    low, high = intervals[worst]
    return Gate("speed.must_beat_float", verdict, ratio, 1.0, (low, high), message)


def would_decide(measured: Mapping[str, Any], shared: int, near: str) -> str:
    """End of an inconclusive gate's message: what would decide it.

    shared: number of questions that share the time
    near: the limit, as in "so near 1"
    """
    if "needed" not in measured:
        return "; too few rounds to decide"
    needed = measured["needed"]
    if needed is None:
        return (
            f"; {measured['reckoned']:,} rounds would not decide: it is {near}, or the timings "
            "scatter too much: run it where nothing else runs"
        )
    seconds = round_up(needed["seconds"] * shared)
    return (
        f"; about {needed['rounds']} rounds would decide: set latency.max_seconds: {seconds} "
        f"(or latency.iterations: {needed['rounds']}, which has no time limit)"
    )


def round_up(seconds: float) -> int:
    """Round up to two digits after adding a tenth, because predicted times are not exact."""
    spared = max(1.1 * seconds, 1.0)
    unit = int(10 ** max(math.floor(math.log10(spared)) - 1, 0))
    return math.ceil(spared / unit) * unit


def _upper(interval: Sequence[float | None]) -> float:
    high = interval[1]
    return float("inf") if high is None else high


def why_slow(cell: Mapping[str, Any], inspected: Mapping[str, Any]) -> str:
    """Explain a candidate slower than float, by the engine's inspection and the times per step."""
    if inspected.get("wider"):
        return in_higher_precision(inspected)
    stages = cell["systems"][CANDIDATE]["stages"]
    total = sum(s["p50"] for s in stages.values())
    forward = stages["forward"]["p50"] / total if total else 0.0
    if forward < 0.5:
        return (
            f"only {forward:.0%} of its time is the forward pass, which is all that is compressed"
        )
    return (
        f"all {inspected.get('eligible')} quantized modules run in integer kernels, so quantizing "
        "the activations costs more than the smaller weights save: the layers are narrow, or only "
        "the weights are quantized and are converted to float at run time"
    )


def in_higher_precision(inspected: Mapping[str, Any]) -> str:
    """Name the modules that the engine runs in higher precision than the recipe asks for."""
    wider = inspected["wider"]
    return (
        f"{len(wider)} of {inspected.get('eligible')} quantized modules run in higher precision "
        f"({', '.join(wider[:3])}{' ...' if len(wider) > 3 else ''})"
    )


def within(percentiles: Mapping[str, Any], limit: float, what: str, shared: int = 1) -> Gate:
    """Judge the 99th percentile against a limit in ms. shared: see would_decide."""
    low, high = percentiles["p99_interval"]
    verdict = "inconclusive"
    if high is not None and high <= limit:
        verdict = "pass"
    elif low is not None and low > limit:
        verdict = "fail"
    message = f"{what} is {percentiles['p99']:.2f} ms"
    if verdict == "fail":
        least, allowed = breach(low, limit)
        message += f"; at least {least}, allowed {allowed}"
    if verdict == "inconclusive":
        message += would_decide(percentiles, shared, f"so near {limit:g} ms")
    return Gate("speed.p99_ms", verdict, percentiles["p99"], limit, (low, high), message)
