"""Inside of a worker process: cores, clocks, array files, and requests line by line.

It imports only numpy and the runtime of a system, so that it runs in the project's environment or
in a peer's. Array files hold "<batch number or size>.<input name>".
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Batch = dict[str, Any]
Run = Callable[[Batch], Any]


def write_batches(batches: Mapping[int, Mapping[str, Any]], path: Path) -> Path:
    """Write an array file and return its path."""
    np.savez(path, **{f"{k}.{n}": a for k, b in batches.items() for n, a in b.items()})
    return path


def read_batches(path: str) -> dict[int, Batch]:
    """Read an array file as {number: {input: array}}."""
    found: dict[int, Batch] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            number, _, name = key.partition(".")
            found.setdefault(int(number), {})[name] = arrays[key]
    return found


def pin(threads: int) -> None:
    """Pin this process to the first `threads` cores, before a runtime starts its threads."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[:threads]))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def load_openvino(model: str, threads: int, options: dict[str, Any]) -> Run:
    """Compile a model for the CPU.

    options: `fixed` to compile once per input shape, `precision` (default fp32)
    """
    import openvino as ov

    core, opened, precision = ov.Core(), {}, options.get("precision", "fp32")
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": {"fp32": "f32"}.get(precision, precision),
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
    }

    def request(shape: tuple[int, ...] | None) -> Any:
        if shape not in opened:
            read = core.read_model(model)
            if shape is not None:
                read.reshape({i.any_name: list(shape) for i in read.inputs})
            opened[shape] = core.compile_model(read, "CPU", settings).create_infer_request()
        return opened[shape]

    def run(batch: Batch) -> Any:
        shape = batch["input_ids"].shape if options.get("fixed") else None
        return next(iter(request(shape).infer(batch).values()))

    return run


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # "cpu" sums all threads


def measure(run: Run, batch: Any, asked: Mapping[str, Any]) -> list[float]:
    """Time calls in milliseconds.

    asked: {"run": number of timed calls, "warmup": number before them, "clock": key of CLOCKS}
    """
    now = CLOCKS[asked.get("clock", "wall")]
    for _ in range(asked["warmup"]):
        run(batch)
    times = []
    for _ in range(asked["run"]):
        start = now()
        run(batch)
        times.append(1000 * (now() - start))
    return times


def redirect_output() -> Any:
    """Send stdout to the log, and return the stream that answers requests."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def answer_requests(answers: Any, answer: Callable[[dict[str, Any]], Any]) -> None:
    """Answer each JSON line of stdin with one on `answers`."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)
