"""Time the generation of the candidate and of every float baseline of the same runtime that the
machine offers (float_baselines.py), in turns in one run.

speed.must_beat_float   time between tokens of the candidate / of the fastest accurate float
                        baseline, in every cell of batch x prompt: an interval wholly below 1
                        passes, wholly at or above 1 fails
speed.p99_ms            interval of the 99th percentile of the time between tokens, in the first
                        cell, against the limit

Timing continues until each gate is decided, within latency.max_seconds: timing/stopping_rules.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from optimizer.foundation.process import freed_memory
from optimizer.foundation.progress import say
from optimizer.harness import contract as contracts
from optimizer.harness.bundle import bench, bench_generation
from optimizer.harness.contract import Contract
from optimizer.harness.runtimes.decoder import Decoder, DecoderRunner
from optimizer.harness.runtimes.ort.run import cores
from optimizer.recipe.schema import Latency, TargetSection
from optimizer.timing.stopping_rules import RatioQuestion
from optimizer.validate import target_runner
from optimizer.validate.gates import Gate
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.timing.batch_timing import measure_size
from optimizer.validate.timing.cells import CANDIDATE, Cell, MoreRounds, Timing, time_cells
from optimizer.validate.timing.float_baselines import (
    FloatBaselines,
    list_baselines,
    write_float_file,
)
from optimizer.validate.timing.openings import Openings, OpenRunner
from optimizer.validate.timing.speed_gates import (
    count_questions,
    describe_higher_precision,
    judge_float,
    judge_percentile,
)

WARMUP = 1  # rounds


@dataclass(frozen=True)
class OwnCache:
    """A runner whose decoders follow the contract of its own model, because the KV caches of a
    reference and of a smaller model have different shapes."""

    runner: DecoderRunner | OpenRunner
    contract: Contract

    def decoder(self, contract: Contract, capacity: int = 0) -> Decoder:  # noqa: ARG002
        return self.runner.decoder(self.contract, capacity)


@dataclass(frozen=True)
class GenerationTimer:
    """CellTimer of text generation.

    texts: texts from which prompts are cut
    openings: runners of the systems
    """

    contract: Contract
    tokenizer: Any
    texts: Sequence[str]
    latency: Latency
    threads: int
    openings: Openings
    percentiles: str = "inter_token"
    warmup: int = WARMUP

    @property
    def per_round(self) -> int:
        return self.latency.new_tokens - 1

    def time(
        self,
        systems: Mapping[str, Any],
        cell: Cell,
        baseline: str = "",
        more: MoreRounds | None = None,
        opening: int = 0,
    ) -> dict[str, Any]:
        return bench_generation.measure_generation(
            systems,
            self.contract,
            self.tokenizer,
            self.texts,
            [cell[1]],
            [cell[0]],
            self.latency.new_tokens,
            RatioQuestion.iterations(opening) or self.latency.iterations,
            warmup=self.warmup,
            threads=self.threads,
            baseline=baseline,
            more=more,
            again=bench.Again(opening, self.openings.open) if opening else None,
        )

    def ratio(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        ratio: dict[str, Any] = measured["ratio"]["inter_token"]
        return ratio

    def milliseconds(self, round_: tuple[float, list[float]]) -> float:
        return sum(round_[1])

    def samples(self, rounds: Sequence[tuple[float, list[float]]]) -> list[float]:
        return [step for _, steps in rounds for step in steps]


def measure(
    m: RunArtifacts, texts: Sequence[str], floats: FloatBaselines | None = None
) -> dict[str, Any]:
    """Measure the report's `speed` section of text generation: measure_generation's document, with
    floats, peak_memory and size as for every task, and `p99` of the candidate alone where the
    recipe has a limit.

    texts: texts from which prompts are cut
    floats: float baselines; None: the result of list_baselines
    """
    latency, target = m.section.validate_.latency, m.section.target
    floats, threads = floats or list_baselines(m), target.intra_op_threads or cores()
    cells = [(b, s) for b in latency.batch for s in latency.sequence]
    count = f"{len(cells)} cells of {1 + len(floats.sections)} systems"
    say(f"validate: timing {count}, {latency.iterations} rounds or more")
    with m.work_folder() as folder:
        files = {
            name: (section, write_float_file(m, section, folder / name))
            for name, section in floats.sections.items()
        }
        files[CANDIDATE] = (target, m.model / "model.onnx")
        folders = {name: m.source if name == CANDIDATE else m.reference for name in files}
        own = {n: contracts.read(folder / "contract.json") for n, folder in folders.items()}
        openings = Openings(
            {
                name: partial(target_runner.open_onnx, section, model, own[name], threads)
                for name, (section, model) in files.items()
            }
        )
        with closing(openings):
            openings.open()
            systems = {name: OwnCache(openings.runner(name), own[name]) for name in files}
            questions = count_questions(latency, len(cells), m.gains)
            timing = Timing(latency, threads, questions)
            timer = GenerationTimer(m.contract, m.encoder, texts, latency, threads, openings)
            measured = time_cells(timer, systems, cells, timing, floats.compared)
        if floats.figures:
            measured["floats"] = dict(floats.figures)
        freed_memory.give_back()  # each system is measured in a process beside this one
        cell = (latency.batch[0], latency.sequence[0])
        measured["peak_memory"] = {
            name: bench.read_peak(_program(folders[name], file, cell, threads))
            for name, file in files.items()
        }
    measured["size"] = {
        "float_bytes": measure_size(m.reference_graph),
        "candidate_bytes": measure_size(m.model),
    }
    return measured


def _program(
    folder: Path, file: tuple[TargetSection, Path], cell: tuple[int, int], threads: int
) -> str:
    """Write the Python program that opens a model and generates two tokens for one batch of
    prompts; its peak memory is measured.

    folder: folder of load or reduce
    file: (section that runs it, ONNX file)
    cell: (batch, tokens of a prompt)
    threads: number of threads of the process
    """
    batch, prompt = cell
    entry = json.dumps(target_runner.describe_engine(*file))
    return (
        "import json\n"
        "from pathlib import Path\n"
        "from optimizer.harness import contract as contracts\n"
        "from optimizer.harness.bundle.engines import Workshop\n"
        "from optimizer.harness.generate import Options, generate\n"
        "from optimizer.harness.inputs import text\n"
        "from optimizer.harness.runtimes.machine import describe_machine\n"
        f"folder, entry = Path({str(folder)!r}), json.loads({entry!r})\n"
        "contract = contracts.read(folder / 'contract.json')\n"
        "tokenizer = text.load_tokenizer(folder / 'checkpoint', contract)\n"
        f"prompts = [[contract.decoder.eos_ids[0]] * {prompt}] * {batch}\n"
        "shop = Workshop(Path('.'), {'files': {}}, describe_machine(), None, contract=contract)\n"
        f"runner = shop.open(entry, 'load', {threads})\n"
        "generate(contract, runner, tokenizer, prompts, Options(2, ignore_eos=True))\n"
        "runner.close()\n"
    )


def judge(section: Mapping[str, Any], latency: Latency, inspected: Mapping[str, Any]) -> list[Gate]:
    """Judge the speed gates of a measured `speed` section.

    inspected: the builder's inspection of the engine
    """
    verdicts, cells = [], section["cells"]
    shared = count_questions(latency, len(cells), "gain" in section)
    if latency.must_beat_float:
        ratios = [
            (
                f"batch {c['batch']}, prompts of {c['prompt']} tokens",
                {**c["ratio"]["inter_token"], "to": c["ratio"]["to"]},
            )
            for c in cells
        ]
        what = "time between tokens"
        verdicts.append(judge_float(ratios, lambda _: _why_slow(inspected), what, shared))
    if latency.p99_ms is not None:
        first = cells[0]["systems"][CANDIDATE]["inter_token"]
        percentiles = section.get("p99", first)
        what = "p99 of the time between tokens"
        verdicts.append(judge_percentile(percentiles, latency.p99_ms, what, shared))
    return verdicts


def _why_slow(inspected: Mapping[str, Any]) -> str:
    if inspected.get("wider"):
        return describe_higher_precision(inspected)
    return (
        "every step reads all weights once, and reading fewer bytes saved less than de-quantizing "
        "costs: the layers are narrow, or most of the work is in float (head, KV cache)"
    )
