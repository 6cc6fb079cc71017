"""How fast the candidate is beside its float baselines: torch and the same runtime in float.

All systems answer the same texts interleaved in one run, with the same number of threads, through
the harness's own code (harness.bench). Gates:

    speed.must_beat_float   candidate / float of the same runtime, in every cell: the ratio's whole
                            interval below 1 passes, at or above 1 fails
    speed.p99_ms            the interval of the 99th percentile of the first cell against the limit
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimizer.harness import bench, tasks
from optimizer.harness.bench import System
from optimizer.harness.contract import Contract
from optimizer.harness.runtimes.ort import OrtRunner, cores
from optimizer.progress import say
from optimizer.recipe import Latency
from optimizer.validate import trace
from optimizer.validate.gates import UNMEASURED, Gate
from optimizer.validate.materials import Materials

CANDIDATE, BASELINE, TORCH = "candidate", "onnxruntime-float", "torch-float"
ROUNDS_FOR_P99 = 400  # the upper end of p99's 95 % interval needs 368 rounds
NEUTRAL = tuple(
    f"This is sentence number {i} and it says nothing that any other data could say."
    for i in range(32)
)
"""Timed when the recipe names no timing data."""


def measure(m: Materials, texts: Sequence[str]) -> dict[str, Any]:
    """The report's `speed` section for a target that runs on this machine."""
    latency, target = m.section.validate_.latency, m.section.target
    threads = getattr(target, "threads", 0) or cores()
    cells = [(b, s) for b in latency.batch for s in latency.sequence]
    device = target.device
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    say(f"validate: timing {len(cells)} cells of 3 systems, {latency.iterations} rounds each")
    try:
        with (
            OrtRunner(m.graph / "model.onnx", device=device, threads=threads) as floating,
            OrtRunner(m.model / "model.onnx", device=device, threads=threads) as candidate,
        ):
            systems = {
                TORCH: torch_system(m.float_model, m.contract, m.tokenizer),
                BASELINE: ort_system(floating, m.contract, m.tokenizer),
                CANDIDATE: ort_system(candidate, m.contract, m.tokenizer),
            }
            section = bench.measure(
                systems, cells, texts, iterations=latency.iterations, threads=threads
            )
            if latency.p99_ms is not None and latency.iterations < ROUNDS_FOR_P99:
                alone = {CANDIDATE: systems[CANDIDATE]}
                again = bench.measure(
                    alone, cells[:1], texts, iterations=ROUNDS_FOR_P99, threads=threads
                )
                section["p99"] = again["cells"][0]["systems"][CANDIDATE]["end_to_end"]
    finally:
        torch.set_num_threads(before)
    section["peak_memory"] = peak_memory(m, cells[0], threads)
    section["size"] = {
        "float_bytes": size(m.graph, "model.onnx"),
        "candidate_bytes": size(m.model, "model.onnx"),
    }
    return section


def ort_system(runner: OrtRunner, contract: Contract, tokenizer: Any) -> System:
    """A bundle's own three steps."""
    return System(
        pre=lambda texts, length: tasks.encode(contract, tokenizer, texts, length=length),
        forward=runner.infer,
        post=lambda outputs, batch: tasks.decode(contract, outputs, batch),
    )


def torch_system(model: nn.Module, contract: Contract, tokenizer: Any) -> System:
    """The same steps around the source model."""
    names = [o.name for o in contract.outputs]
    return System(
        pre=lambda texts, length: tasks.encode(contract, tokenizer, texts, length=length),
        forward=lambda batch: trace.run(model, batch, names),
        post=lambda outputs, batch: tasks.decode(contract, outputs, batch),
    )


def size(folder: Path, name: str) -> int:
    """Bytes of an ONNX model, weights beside it included."""
    return sum(f.stat().st_size for f in (folder / name, folder / f"{name}.data") if f.is_file())


def peak_memory(m: Materials, cell: tuple[int, int], threads: int) -> dict[str, int]:
    """Peak resident bytes of a fresh process that answers one batch, per system."""
    batch, sequence = cell
    shared = (
        "from pathlib import Path\nimport numpy as np\n"
        f"names = {[i.name for i in m.contract.inputs]!r}\n"
        f"batch = {{n: np.ones(({batch}, {sequence}), np.int64) for n in names}}\n"
    )

    def ort(path: Path) -> str:
        return shared + (
            "from optimizer.harness.runtimes.ort import OrtRunner\n"
            f"with OrtRunner(Path({str(path)!r}), threads={threads}) as runner:\n"
            "    runner.infer(batch)\n"
        )

    in_torch = shared + (
        "from optimizer.load.checkpoint import open_checkpoint\n"
        "from optimizer.load.model import torch_model\n"
        "from optimizer.validate.trace import run\n"
        f"model = torch_model(open_checkpoint(Path({str(m.source)!r})), {m.task!r})\n"
        f"run(model, batch, {m.outputs!r})\n"
    )
    return {
        TORCH: bench.peak_memory(in_torch),
        BASELINE: bench.peak_memory(ort(m.graph / "model.onnx")),
        CANDIDATE: bench.peak_memory(ort(m.model / "model.onnx")),
    }


def gates(section: Mapping[str, Any], latency: Latency, inspected: Mapping[str, Any]) -> list[Gate]:
    """The recipe's speed gates on a measured section."""
    made = []
    if latency.must_beat_float:
        made.append(_beats_float(section["cells"], inspected))
    if latency.p99_ms is not None:
        first = section["cells"][0]["systems"][CANDIDATE]["end_to_end"]
        made.append(_within(section.get("p99", first), latency.p99_ms))
    return made


def unmeasured(latency: Latency, why: str) -> list[Gate]:
    """The recipe's speed gates where nothing could be timed: neither passed nor left out."""
    declared = [("speed.must_beat_float", 1.0)] if latency.must_beat_float else []
    if latency.p99_ms is not None:
        declared.append(("speed.p99_ms", latency.p99_ms))
    return [Gate(name, UNMEASURED, None, limit, None, why) for name, limit in declared]


def _beats_float(cells: Sequence[Mapping[str, Any]], inspected: Mapping[str, Any]) -> Gate:
    """The worst cell decides: the one whose interval reaches highest."""
    worst = max(cells, key=lambda c: _upper(c["ratio"]["interval"]))
    low, high = worst["ratio"]["interval"]
    verdict = "pass" if _upper((low, high)) < 1 else "inconclusive"
    if any(c["ratio"]["interval"][0] is not None and c["ratio"]["interval"][0] >= 1 for c in cells):
        verdict = "fail"
        worst = max(cells, key=lambda c: c["ratio"]["interval"][0] or 0.0)
        low, high = worst["ratio"]["interval"]
    where = f"batch {worst['batch']}, sequence {worst['sequence']}"
    ratio = worst["ratio"]["median"]
    message = f"{ratio:.2f} times the time of {BASELINE} at {where}"
    if verdict == "inconclusive":
        message += "; more latency.iterations would decide"
    if verdict == "fail":
        message += f"; {why_slow(worst, inspected)}"
    return Gate("speed.must_beat_float", verdict, ratio, 1.0, (low, high), message)


def _upper(interval: Sequence[float | None]) -> float:
    high = interval[1]
    return float("inf") if high is None else high


def why_slow(cell: Mapping[str, Any], inspected: Mapping[str, Any]) -> str:
    """What the engine's inspection and the stages say about a candidate slower than float."""
    wider = inspected.get("wider") or []
    if wider:
        return (
            f"{len(wider)} of {inspected.get('eligible')} quantized modules run wider than asked "
            f"({', '.join(wider[:3])}{' ...' if len(wider) > 3 else ''})"
        )
    stages = cell["systems"][CANDIDATE]["stages"]
    total = sum(s["p50"] for s in stages.values())
    forward = stages["forward"]["p50"] / total if total else 0.0
    if forward < 0.5:
        return (
            f"only {forward:.0%} of its time is the forward pass, which is all that is compressed"
        )
    return (
        f"all {inspected.get('eligible')} quantized modules run in integer kernels, so coding the "
        "activations costs more than the smaller weights save: the layers are narrow, or the "
        "weights alone are quantized and are widened at run time"
    )


def _within(found: Mapping[str, Any], limit: float) -> Gate:
    low, high = found["p99_interval"]
    verdict = "inconclusive"
    if high is not None and high <= limit:
        verdict = "pass"
    elif low is not None and low > limit:
        verdict = "fail"
    message = f"p99 end to end is {found['p99']:.2f} ms"
    if verdict == "inconclusive":
        message += f"; its interval spans {limit} ms, or more latency.iterations are needed"
    return Gate("speed.p99_ms", verdict, found["p99"], limit, (low, high), message)
