"""Events of the kernels in ONNX Runtime's profile of some runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.harness.runtimes.ort.run import OrtRunner

Event = Mapping[str, Any]
"""Event of a kernel: `dur` in microseconds, `args` with its operator and sizes of its arrays."""

KERNEL, FUSED = "_kernel_time", "fused "
CONTAINERS = frozenset({"If", "Loop", "Scan"})
"""Operators whose time is that of the kernels inside them, which have events of their own."""


def kernels(
    runner: OrtRunner, arrays: Mapping[str, Any], rounds: int, *, packed: bool = True
) -> list[Event]:
    """Profile `rounds` runs of a model in ONNX Runtime; return the events of its kernels, in order.

    runner: gives the file, the device and the threads; another session is profiled
    packed: False profiles without prepacking: slower, with the sizes of weights in the events
    """
    with (
        make_temporary_folder("profile") as folder,
        OrtRunner(
            runner.model,
            device=runner.provider,
            threads=runner.threads,
            mapped=not packed,
            profile=folder / "profile",
        ) as profiled,
    ):
        for _ in range(rounds):
            profiled.infer(arrays)
        events = json.loads(Path(profiled.end_profiling()).read_text("utf-8"))
    return select_kernels(events)


def select_kernels(events: Iterable[Any]) -> list[Event]:
    """Return the events of kernels among those of a profile."""
    return [
        e
        for e in events
        if isinstance(e, dict)
        and e.get("cat") == "Node"
        and str(e["name"]).endswith(KERNEL)
        and e.get("args", {}).get("op_name") not in CONTAINERS
    ]


def node_of(event: Event) -> str:
    """Return the name of the node that an event's kernel computes."""
    return str(event["name"].removesuffix(KERNEL))


def module_of(node: str) -> str:
    """Return the module in the name of a profiled node; "" for nodes of no module."""
    module, slash, _ = node.removeprefix(FUSED).partition("/")
    return module if slash else ""
