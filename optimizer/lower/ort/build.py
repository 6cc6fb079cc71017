"""Open the lowered model with ONNX Runtime, and inspect the optimized graph."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.lower.ort.inspection import inspect
from optimizer.recipe.schema import OnnxRuntimeTarget, TargetSection

MINIMUM, GRAPHS_MINIMUM = "1.26", "1.31"  # the later one releases captured graphs


def fit(section: OnnxRuntimeTarget) -> dict[str, Any]:
    """Return what an ONNX Runtime target requires of a machine, and settings of the runtime
    (harness/bundle/fit.py)."""
    divided = {"divide_batches": section.divide_batches} if section.device == "cpu" else {}
    if section.replays_graphs:
        return {"runtime_minimum": GRAPHS_MINIMUM, "cuda_graphs": True}
    return {"runtime_minimum": MINIMUM, **divided}


def build(section: TargetSection, model: Path, _out: Path) -> dict[str, Any]:
    """Open the lowered model with ONNX Runtime and inspect the optimized graph. Returns entries of
    engine.json.

    model: the lower stage's folder
    Raises harness.errors.MachineError where it cannot be opened here.
    """
    with make_temporary_folder("build") as folder:
        optimized = folder / "optimized.onnx"
        with suppress(OSError):  # only operators and names are read: the weights go nowhere
            (folder / f"{optimized.name}.data").symlink_to(os.devnull)
        with OrtRunner(
            model / "model.onnx",
            device=section.runs_on,
            threads=section.intra_op_threads,
            optimized=optimized,
            mapped=True,
        ) as runner:
            placed, stayed = runner.placed, runner.on_cpu
        inspected = add_cpu_nodes(inspect(model, optimized), stayed)
    return {"inspected": inspected, **({"placed": placed} if section.device != "cpu" else {})}


def add_cpu_nodes(inspected: dict[str, Any], stayed: Sequence[str]) -> dict[str, Any]:
    """Return the build's inspection with `wider` extended by computing nodes that run on the CPU
    because the GPU's provider lacks them.

    stayed: names of these nodes
    """
    left = [f"{node} on the CPU" for node in stayed]
    return {**inspected, "wider": [*inspected["wider"], *left]}
