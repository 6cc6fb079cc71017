"""Time the modules of a model in ONNX Runtime's profile, beside the roofline of the machine.

A node of a lowered model is named MODULE/OPERATOR, and the runtime's fusions keep that name, so the
kernels of a profile are those of the checkpoint's modules. A node's time is the median over rounds.
Profiling slows small kernels, so that shares mean more than times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any

from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.measure import roofline
from optimizer.measure.ort_profile import kernels, module_of, node_of
from optimizer.measure.roofline import MachineRates

WARMUP, ROUNDS = 5, 30


def measure(
    runner: OrtRunner, arrays: Mapping[str, Any], rates: MachineRates | None = None
) -> dict[str, Any]:
    """Profile a batch by module in ONNX Runtime.

    Returns {rounds, ms: sum over modules, modules: [{module, ms, share}], the slowest first}.

    runner: gives the file, the device and the threads; another session is profiled
    arrays: inputs of the model
    rates: rates of this machine, which add `attained` to each module: the least time of its kernels
        by the roofline, divided by their time; None if the work of a kernel is not known
    """
    by_node: dict[str, list[float]] = defaultdict(list)
    for event in kernels(runner, arrays, WARMUP + ROUNDS):
        by_node[node_of(event)].append(event["dur"] / 1000)
    by_module: dict[str, float] = defaultdict(float)
    for name, times in by_node.items():
        per_round = len(times) // (WARMUP + ROUNDS)
        counted = times[per_round * WARMUP :]
        by_module[module_of(name)] += median(counted) * max(per_round, 1)
    whole = sum(by_module.values())
    ordered = sorted(by_module.items(), key=lambda item: (-item[1], item[0]))
    rows: list[dict[str, Any]] = [
        {"module": m, "ms": ms, "share": ms / whole if whole else 0.0} for m, ms in ordered
    ]
    if rates is not None:
        least = _least(runner, arrays, rates, list(by_node))
        for row in rows:
            row["attained"] = _ratio(least[row["module"]], row["ms"])
    return {"rounds": ROUNDS, "ms": whole, "modules": rows}


def _ratio(least: float | None, ms: float) -> float | None:
    return None if least is None or not ms else least / ms


def _least(
    runner: OrtRunner, arrays: Mapping[str, Any], rates: MachineRates, nodes: list[str]
) -> dict[str, float | None]:
    """Return {module: ms that its kernels take at least, by the roofline}.

    None for a module with a kernel whose work is not known. The sizes of weights come from a run
    without prepacking.

    nodes: names of the nodes to add up
    """
    of_node: dict[str, float | None] = {}
    for event in kernels(runner, arrays, 1, packed=False):
        work, node = roofline.work_of(event), node_of(event)
        before = of_node.get(node, 0.0)
        known = None if work is None or before is None else before + rates.milliseconds(work)
        of_node[node] = known
    by_module: dict[str, float | None] = {}
    for node in nodes:
        module, ms = module_of(node), of_node.get(node)
        before = by_module.get(module, 0.0)
        by_module[module] = None if ms is None or before is None else before + ms
    return by_module
