"""How fast the candidate writes beside the same runtime in float, both timed in one run.

speed.must_beat_float   time between tokens, candidate / float, in every cell of batch x prompt:
                        the ratio's whole interval below 1 passes, at or above 1 fails
speed.p99_ms            the interval of the 99th percentile of the time between tokens, in the
                        first cell, against the limit
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.harness import bench
from optimizer.harness.bench_generation import measure_generation
from optimizer.harness.runtimes.ort import OrtRunner, cores
from optimizer.progress import say
from optimizer.recipe import Latency
from optimizer.validate import speed
from optimizer.validate.gates import Gate
from optimizer.validate.materials import Materials
from optimizer.validate.speed import BASELINE, CANDIDATE, ROUNDS_FOR_P99


def measure(m: Materials, texts: Sequence[str]) -> dict[str, Any]:
    """The report's `speed` section: bench_generation.measure_generation's, with peak_memory and
    size as for every task, and `p99` when the cells have too few steps to bound it."""
    latency, target = m.section.validate_.latency, m.section.target
    threads = getattr(target, "threads", 0) or cores()
    count = len(latency.batch) * len(latency.sequence)
    say(f"validate: timing {count} cells of 2 systems, {latency.iterations} rounds each")
    files = {BASELINE: m.graph / "model.onnx", CANDIDATE: m.model / "model.onnx"}

    def timed(systems: Mapping[str, OrtRunner], iterations: int, cells: int = 0) -> dict[str, Any]:
        return measure_generation(
            systems,
            m.contract,
            m.tokenizer,
            texts,
            latency.sequence[: cells or None],
            latency.batch[: cells or None],
            latency.new_tokens,
            iterations,
            threads=threads,
        )

    with (
        OrtRunner(files[BASELINE], device=target.device, threads=threads) as floating,
        OrtRunner(files[CANDIDATE], device=target.device, threads=threads) as candidate,
    ):
        section = timed({BASELINE: floating, CANDIDATE: candidate}, latency.iterations)
        steps = latency.new_tokens - 1
        if latency.p99_ms is not None and latency.iterations * steps < ROUNDS_FOR_P99:
            again = timed({CANDIDATE: candidate}, math.ceil(ROUNDS_FOR_P99 / steps), 1)
            section["p99"] = again["cells"][0]["systems"][CANDIDATE]["inter_token"]
    cell = (latency.batch[0], latency.sequence[0])
    section["peak_memory"] = {
        name: bench.peak_memory(_program(m, file, cell, threads)) for name, file in files.items()
    }
    section["size"] = {
        "float_bytes": speed.size(m.graph, "model.onnx"),
        "candidate_bytes": speed.size(m.model, "model.onnx"),
    }
    return section


def _program(m: Materials, file: Path, cell: tuple[int, int], threads: int) -> str:
    """Python that opens the model and continues one batch of prompts by two tokens."""
    batch, prompt = cell
    return (
        "from pathlib import Path\n"
        "from optimizer.harness import contract as contracts\n"
        "from optimizer.harness.generate import Options, generate\n"
        "from optimizer.harness.runtimes.ort import OrtRunner\n"
        f"folder = Path({str(m.source)!r})\n"
        "contract = contracts.read(folder / 'contract.json')\n"
        "tokenizer = contracts.load_tokenizer(folder / 'checkpoint', contract)\n"
        f"prompts = [[contract.generation.eos_ids[0]] * {prompt}] * {batch}\n"
        f"with OrtRunner(Path({str(file)!r}), threads={threads}) as runner:\n"
        "    generate(contract, runner, tokenizer, prompts, Options(2, ignore_eos=True))\n"
    )


def gates(section: Mapping[str, Any], latency: Latency, inspected: Mapping[str, Any]) -> list[Gate]:
    """The recipe's speed gates on a measured section."""
    made, cells = [], section["cells"]
    if latency.must_beat_float:
        ratios = [
            (f"batch {c['batch']}, prompts of {c['prompt']} tokens", c["ratio"]["inter_token"])
            for c in cells
        ]
        made.append(
            speed.beats_float(ratios, lambda _: _why_slow(inspected), "time between tokens")
        )
    if latency.p99_ms is not None:
        first = cells[0]["systems"][CANDIDATE]["inter_token"]
        found = section.get("p99", first)
        made.append(speed.within(found, latency.p99_ms, "p99 of the time between tokens"))
    return made


def _why_slow(inspected: Mapping[str, Any]) -> str:
    if inspected.get("wider"):
        return speed.run_wider(inspected)
    return (
        "every step reads all weights once, and reading fewer bytes gained less than widening the "
        "codes cost: the layers are narrow, or what stayed float (head, cache) is most of the work"
    )
