"""How fast the candidate is beside its float baselines: torch and the same runtime in float.

All systems answer the same texts interleaved in one run, with the same number of threads, through
the harness's own code (harness.bench). Gates:

    speed.must_beat_float   candidate / float of the same runtime, in every cell: the ratio's whole
                            interval below 1 passes, at or above 1 fails
    speed.p99_ms            the interval of the 99th percentile of the first cell against the limit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from optimizer.validate.breach import breach
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
    device = getattr(target, "runs_on", target.device)
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
        cells = section["cells"]
        ratios = [(f"batch {c['batch']}, sequence {c['sequence']}", c["ratio"]) for c in cells]
        made.append(beats_float(ratios, lambda i: why_slow(cells[i], inspected)))
    if latency.p99_ms is not None:
        first = section["cells"][0]["systems"][CANDIDATE]["end_to_end"]
        made.append(within(section.get("p99", first), latency.p99_ms, "p99 end to end"))
    return made


def unmeasured(latency: Latency, why: str) -> list[Gate]:
    """The recipe's speed gates where nothing could be timed: neither passed nor left out."""
    declared = [("speed.must_beat_float", 1.0)] if latency.must_beat_float else []
    if latency.p99_ms is not None:
        declared.append(("speed.p99_ms", latency.p99_ms))
    return [Gate(name, UNMEASURED, None, limit, None, why) for name, limit in declared]


def beats_float(
    cells: Sequence[tuple[str, Mapping[str, Any]]], why: Callable[[int], str], what: str = "time"
) -> Gate:
    """The worst cell decides: the one whose interval reaches highest. cells: where, and the ratio
    to float with its interval; why: of the i-th cell, when it is slower."""
    intervals = [ratio["interval"] for _, ratio in cells]
    worst = max(range(len(cells)), key=lambda i: _upper(intervals[i]))
    verdict = "pass" if _upper(intervals[worst]) < 1 else "inconclusive"
    if any(low is not None and low >= 1 for low, _ in intervals):
        verdict = "fail"
        worst = max(range(len(cells)), key=lambda i: intervals[i][0] or 0.0)
    where, found = cells[worst]
    ratio = found["median"]
    message = f"{breach(ratio, 1.0)[0]} times the {what} of {BASELINE} at {where}"
    if verdict == "inconclusive":
        message += "; more latency.iterations would decide"
    if verdict == "fail":
        message += f"; {why(worst)}"
    low, high = intervals[worst]
    return Gate("speed.must_beat_float", verdict, ratio, 1.0, (low, high), message)


def _upper(interval: Sequence[float | None]) -> float:
    high = interval[1]
    return float("inf") if high is None else high


def why_slow(cell: Mapping[str, Any], inspected: Mapping[str, Any]) -> str:
    """What the engine's inspection and the stages say about a candidate slower than float."""
    if inspected.get("wider"):
        return run_wider(inspected)
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


def run_wider(inspected: Mapping[str, Any]) -> str:
    """Which modules the engine runs wider than asked."""
    wider = inspected["wider"]
    return (
        f"{len(wider)} of {inspected.get('eligible')} quantized modules run wider than asked "
        f"({', '.join(wider[:3])}{' ...' if len(wider) > 3 else ''})"
    )


def within(found: Mapping[str, Any], limit: float, what: str) -> Gate:
    """The 99th percentile of `found` against a limit in ms."""
    low, high = found["p99_interval"]
    verdict = "inconclusive"
    if high is not None and high <= limit:
        verdict = "pass"
    elif low is not None and low > limit:
        verdict = "fail"
    message = f"{what} is {found['p99']:.2f} ms"
    if verdict == "fail":
        least, allowed = breach(low, limit)
        message += f"; {least} at least, {allowed} is allowed"
    if verdict == "inconclusive":
        message += f"; its interval spans {limit} ms, or more latency.iterations are needed"
    return Gate("speed.p99_ms", verdict, found["p99"], limit, (low, high), message)
