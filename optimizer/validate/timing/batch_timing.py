"""Time the candidate and its float baselines in turns: torch, and every float baseline of the same
runtime that the machine offers (float_baselines.py). For tasks that answer a batch in one forward
pass.

All systems answer the same texts in one run, with the same number of threads, through the harness's
own code (harness.bundle.bench). Gates:

    speed.must_beat_float   time of the candidate / time of the fastest accurate float baseline, in
                            every cell: an interval wholly below 1 passes, wholly at or above 1
                            fails. All systems but torch are opened again after some rounds,
                            because a session's place in memory makes it faster or slower
    speed.p99_ms            interval of the 99th percentile in the first cell, against the limit
    speed.latency_gain      see latency_gain.py

Timing continues until each gate is decided, within latency.max_seconds: timing/stopping_rules.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from optimizer.foundation.progress import say
from optimizer.harness import tasks
from optimizer.harness.bundle import bench
from optimizer.harness.bundle.bench import System
from optimizer.harness.contract import Contract
from optimizer.harness.runtimes.ort.run import cores
from optimizer.recipe.schema import Latency, TargetSection
from optimizer.timing.stopping_rules import RatioQuestion
from optimizer.validate import target_runner
from optimizer.validate.gates import Gate
from optimizer.validate.ledger import trace
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.timing.cells import CANDIDATE, Cell, MoreRounds, Timing, time_cells
from optimizer.validate.timing.float_baselines import (
    FloatBaselines,
    list_baselines,
    write_float_file,
)
from optimizer.validate.timing.openings import Openings
from optimizer.validate.timing.speed_gates import (
    count_questions,
    describe_higher_precision,
    judge_float,
    judge_percentile,
)

TORCH = "torch-float"
WARMUP = 5  # rounds: ONNX Runtime compares its ways to split a batch in them (divided.RUNS)


def measure(
    m: RunArtifacts, texts: Sequence[Any], floats: FloatBaselines | None = None
) -> dict[str, Any]:
    """Measure the report's `speed` section of a target that runs on this machine.

    texts: timed inputs
    floats: float baselines; None: the result of list_baselines
    """
    latency, target = m.section.validate_.latency, m.section.target
    floats = floats or list_baselines(m)
    threads = target.intra_op_threads or cores()
    tokenizer = m.contract.tokenizer
    shortest = (tokenizer.padded_to or 1) if tokenizer else 1
    cells = list_cells(latency, tasks.longest(m.contract), shortest)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    count = f"{len(cells)} cells of {2 + len(floats.sections)} systems"
    say(f"validate: timing {count}, {latency.iterations} rounds or more")
    in_torch = partial(trace.run, m.reference_model, outputs=m.outputs)
    systems = {TORCH: make_system(in_torch, m.contract, m.encoder)}
    with m.work_folder() as folder:
        files = _files(m, floats, folder)
        openings = Openings(
            {
                name: partial(target_runner.open_onnx, section, model, m.contract, threads)
                for name, (section, model) in files.items()
            }
        )
        try:
            with closing(openings):
                openings.open()
                systems |= {
                    name: make_system(openings.runner(name).infer, m.contract, m.encoder)
                    for name in files
                }
                timing = Timing(latency, threads, count_questions(latency, len(cells), m.gains))
                timer = BatchTimer(texts, latency, threads, openings)
                measured = time_cells(timer, systems, cells, timing, floats.compared)
        finally:
            torch.set_num_threads(before)
        measured["peak_memory"] = measure_peak_memory(m, files, cells[0], threads)
    if floats.figures:
        measured["floats"] = dict(floats.figures)
    measured["size"] = {
        "float_bytes": measure_size(m.reference_graph),
        "candidate_bytes": measure_size(m.model),
    }
    return measured


def _files(
    m: RunArtifacts, floats: FloatBaselines, folder: Path
) -> dict[str, tuple[TargetSection, Path]]:
    """Return {name: (section that runs it, ONNX file)} of every system but torch.

    folder: empty folder, for files that are lowered for this timing
    """
    files = {
        name: (section, write_float_file(m, section, folder / name))
        for name, section in floats.sections.items()
    }
    return {**files, CANDIDATE: (m.section.target, m.model / "model.onnx")}


def list_cells(latency: Latency, longest: int, shortest: int = 1) -> list[Cell]:
    """List the cells (batch, sequence) to time, each once. A cell has the length that is run:
    sequences are truncated to `longest` tokens and padded to `shortest`."""
    lengths = dict.fromkeys(min(max(n, shortest), longest) for n in latency.sequence)
    return [(batch, length) for batch in latency.batch for length in lengths]


@dataclass(frozen=True)
class BatchTimer:
    """CellTimer of tasks whose candidate and baselines answer a batch in one forward pass.

    texts: timed inputs
    openings: runners of the systems
    """

    texts: Sequence[Any]
    latency: Latency
    threads: int
    openings: Openings
    percentiles: str = "end_to_end"
    warmup: int = WARMUP
    per_round: int = 1

    def time(
        self,
        systems: Mapping[str, System],
        cell: Cell,
        baseline: str = "",
        more: MoreRounds | None = None,
        opening: int = 0,
    ) -> dict[str, Any]:
        return bench.measure(
            systems,
            [cell],
            self.texts,
            iterations=RatioQuestion.iterations(opening) or self.latency.iterations,
            warmup=self.warmup,
            threads=self.threads,
            baseline=baseline,
            more=more,
            beside={TORCH},
            again=bench.Again(opening, self.openings.open) if opening else None,
        )

    def ratio(self, measured: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        return measured["ratio"]

    def milliseconds(self, round_: float) -> float:
        return round_

    def samples(self, rounds: Sequence[float]) -> list[float]:
        return list(rounds)


def make_system(forward: Callable[[Any], Any], contract: Contract, encoder: Any) -> System:
    """Make the three steps that a bundle times: pre-processing, forward pass, post-processing.

    forward: function that computes the outputs, {name: array}, of a batch of the model's inputs
    """
    return System(
        pre=lambda texts, length: tasks.encode(contract, encoder, texts, None, length),
        forward=forward,
        post=lambda outputs, batch: tasks.decode(contract, outputs, batch),
        lengthen=tasks.look_up(contract).inputs.lengthen,
    )


def measure_size(folder: Path) -> int:
    """Return the bytes of the timed ONNX model in `folder`, external weights included."""
    files = (folder / "model.onnx", folder / "model.onnx.data")
    return sum(f.stat().st_size for f in files if f.is_file())


def measure_peak_memory(
    m: RunArtifacts,
    files: Mapping[str, tuple[TargetSection, Path]],
    cell: tuple[int, int],
    threads: int,
) -> dict[str, int]:
    """Measure the peak resident bytes of a fresh process that answers one batch: {system: bytes}.

    files: result of `_files`
    cell: (batch, sequence)
    threads: number of threads of the process
    """
    batch, sequence = cell
    shared = (
        "import json\nfrom pathlib import Path\nimport numpy as np\n"
        f"inputs = {_shapes(m.contract, batch, sequence)!r}\n"
        "batch = {n: np.ones(shape, kind) for n, (shape, kind) in inputs.items()}\n"
    )

    def served_file(section: TargetSection, model: Path) -> str:
        entry = json.dumps(target_runner.describe_engine(section, model))
        return shared + (
            "from optimizer.harness.bundle.engines import Workshop\n"
            "from optimizer.harness.runtimes.machine import describe_machine\n"
            f"entry = json.loads({entry!r})\n"
            "shop = Workshop(Path('.'), {'files': {}}, describe_machine(), None)\n"
            f"shop.open(entry, 'load', {threads}).infer(batch)\n"
        )

    in_torch = shared + (
        "from optimizer.model.checkpoint.checkpoint import open_checkpoint\n"
        "from optimizer.model.checkpoint.model import load_torch_model\n"
        "from optimizer.validate.ledger.trace import run\n"
        f"model = load_torch_model(open_checkpoint(Path({str(m.reference)!r})), {m.task!r})\n"
        f"run(model, batch, {m.outputs!r})\n"
    )
    programs = {name: served_file(*file) for name, file in files.items()}
    return {n: bench.read_peak(code) for n, code in {TORCH: in_torch, **programs}.items()}


def _shapes(
    contract: Contract, batch: int, sequence: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return {input: (shape, type)} of a timed batch of `batch` rows of `sequence` tokens."""
    sizes = {"batch": batch, "sequence": sequence}
    return {
        i.name: (tuple(sizes[a] if isinstance(a, str) else a for a in i.axes), i.dtype)
        for i in contract.inputs
    }


def judge(section: Mapping[str, Any], latency: Latency, inspected: Mapping[str, Any]) -> list[Gate]:
    """Judge the speed gates of a measured `speed` section.

    inspected: the builder's inspection of the engine
    """
    verdicts = []
    if latency.must_beat_float:
        cells = section["cells"]
        ratios = [(f"batch {c['batch']}, sequence {c['sequence']}", c["ratio"]) for c in cells]
        shared = count_questions(latency, len(cells), "gain" in section)
        verdicts.append(
            judge_float(ratios, lambda i: explain_slow(cells[i], inspected), shared=shared)
        )
    if latency.p99_ms is not None:
        first = section["cells"][0]["systems"][CANDIDATE]["end_to_end"]
        percentiles = section.get("p99", first)
        shared = count_questions(latency, len(section["cells"]), "gain" in section)
        verdicts.append(judge_percentile(percentiles, latency.p99_ms, "p99 end to end", shared))
    return verdicts


def explain_slow(cell: Mapping[str, Any], inspected: Mapping[str, Any]) -> str:
    """Explain why the candidate takes longer than float at one batch size and length.

    cell: times at that batch size and length, also those of tokenizing, forward pass, decoding
    inspected: result of the engine's inspection
    """
    if inspected.get("wider"):
        return describe_higher_precision(inspected)
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
