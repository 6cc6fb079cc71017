"""Time the modules of a model in ONNX Runtime's profile.

A node of a lowered model is named MODULE/OPERATOR, and the runtime's fusions keep that name, so the
kernels of a profile are those of the checkpoint's modules. A node's time is the median over rounds.
Profiling slows small kernels, so that shares mean more than times.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from optimizer.harness.process.temporary import temporary_folder
from optimizer.harness.runtimes.ort.run import OrtRunner

WARMUP, ROUNDS = 5, 30
KERNEL, FUSED = "_kernel_time", "fused "


def measure(runner: OrtRunner, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """{rounds, ms: sum over modules, modules: [{module, ms, share}], the slowest first} of a batch.
    runner: names the file, the device and the threads; another session is profiled."""
    with (
        temporary_folder("profile") as folder,
        OrtRunner(
            runner.model, device=runner.provider, threads=runner.threads, profile=folder / "profile"
        ) as profiled,
    ):
        for _ in range(WARMUP + ROUNDS):
            profiled.infer(arrays)
        events = json.loads(Path(profiled.end_profiling()).read_text("utf-8"))
    by_node: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(KERNEL):
            by_node[event["name"].removesuffix(KERNEL)].append(event["dur"] / 1000)
    by_module: dict[str, float] = defaultdict(float)
    for name, times in by_node.items():
        per_round = len(times) // (WARMUP + ROUNDS)
        counted = times[per_round * WARMUP :]
        by_module[module_of(name)] += median(counted) * max(per_round, 1)
    whole = sum(by_module.values())
    ordered = sorted(by_module.items(), key=lambda item: (-item[1], item[0]))
    rows = [{"module": m, "ms": ms, "share": ms / whole if whole else 0.0} for m, ms in ordered]
    return {"rounds": ROUNDS, "ms": whole, "modules": rows}


def module_of(node: str) -> str:
    """Name of a node's module; "" for nodes of no module."""
    module, slash, _ = node.removeprefix(FUSED).partition("/")
    return module if slash else ""
