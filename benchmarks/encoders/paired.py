"""Time ONNX files of one encoder in turns in one process, as ratios within each round.

    python -m benchmarks.encoders.paired ours=BUNDLE/model/onnxruntime-cpu/model.onnx \\
        float=FLOAT.onnx --dynamic FLOAT.onnx --out benchmarks/results/encoder_paired.json

--dynamic adds ONNX Runtime's quantize_dynamic of a float file as `dynamic`, the denominator of all
ratios; without it the first file is. All have the session options of
optimizer/harness/runtimes/ort/run.py and the same random tokens, without padding. The order is
random in each round. Each timed call follows an untimed one of the same session, because other
sessions have filled the caches.

--how: threads share a batch by operators, by rows (divided.py), or each system both ways, as
`NAME by rows` and `NAME`.
--distance measures before and after each call how far two processors lie apart
(processor_distance.c, compiled by cc), and separates calls while they were near from calls while
they were far: the round trip of a cache line below, or above, twice the least of the run.

int8.py times each system in a process of its own, with quality. Two virtual processors have minutes
in which elementwise operators of two threads take two to five times as long; only turns within a
round see the same machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.ort.run import OrtRunner

RESAMPLED = 2000
FAR = 2  # times the least round trip
HOW = {"operators": [False], "rows": [True], "both": [False, True]}
Distance = Callable[[], float]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("models", nargs="+", metavar="NAME=FILE")
    p.add_argument("--dynamic", type=Path, metavar="FLOAT.onnx")
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    p.add_argument("--sequences", type=int, nargs="+", default=[128])
    p.add_argument("--rounds", type=int, default=60, help="at batch 1; of others a third")
    p.add_argument("--vocabulary", type=int, default=30_000)
    p.add_argument("--how", choices=list(HOW), default="operators")
    p.add_argument("--distance", action="store_true")
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    files = {name: Path(file) for name, _, file in (m.partition("=") for m in args.models)}
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as scratch:
        if args.dynamic:
            files = {"dynamic": dynamic(args.dynamic, Path(scratch) / "dynamic.onnx"), **files}
        distance = measured_distance(Path(scratch)) if args.distance else None
        cells = [
            cell
            for threads in args.threads
            for batch in args.batches
            for sequence in args.sequences
            for cell in timed(files, threads, (batch, sequence), args, distance)
        ]
    result = {"machine": describe_machine().to_json(), "load": load, "cells": cells}
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


def dynamic(file: Path, out: Path) -> Path:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(file, out, per_channel=True)
    return out


def measured_distance(scratch: Path) -> Distance:
    """Measure the round trip between the first two processors of this process."""
    library, source = scratch / "distance.so", Path(__file__).parent / "processor_distance.c"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-lpthread"]
    subprocess.run(command, check=True)
    round_trip = ctypes.CDLL(str(library)).round_trip
    round_trip.restype = ctypes.c_double
    first, second = sorted(os.sched_getaffinity(0))[:2]
    return lambda: float(round_trip(first, second))


@dataclass
class Call:
    """Timed call of one system. trips: round trips before and after it, in nanoseconds."""

    milliseconds: float
    trips: tuple[float, ...] = field(default=())

    def lies(self, limit: float) -> str:
        if not self.trips:
            return ""
        above = [trip > limit for trip in self.trips]
        return "far" if all(above) else "changing" if any(above) else "near"


def timed(
    files: dict[str, Path],
    threads: int,
    shape: tuple[int, int],
    args: argparse.Namespace,
    distance: Distance | None,
) -> list[dict[str, Any]]:
    """Time one cell; with --distance one cell for near and one for far processors."""
    draw, order = np.random.default_rng(0), random.Random(0)
    arrays = {
        "input_ids": draw.integers(999, args.vocabulary, shape),
        "attention_mask": np.ones(shape, np.int64),
        "token_type_ids": np.zeros(shape, np.int64),
    }
    runners = {
        f"{name} by rows" if divide else name: OrtRunner(file, threads=threads, divide=divide)
        for name, file in files.items()
        for divide in HOW[args.how]
    }
    rounds: list[dict[str, Call]] = []
    for _ in range(args.rounds if shape[0] == 1 else args.rounds // 3):
        calls = {}
        for name in order.sample(list(runners), len(runners)):
            feed = {n: arrays[n] for n in runners[name].inputs}
            runners[name].infer(feed)
            before = () if distance is None else (distance(),)
            start = time.perf_counter()
            runners[name].infer(feed)
            taken = 1e3 * (time.perf_counter() - start)
            calls[name] = Call(taken, () if distance is None else (*before, distance()))
        rounds.append(calls)
    for runner in runners.values():
        runner.close()
    trips = [trip for calls in rounds for call in calls.values() for trip in call.trips]
    limit = FAR * min(trips, default=0.0)
    groups: dict[str, list[dict[str, Call]]] = {}
    for calls in rounds:
        places = {call.lies(limit) for call in calls.values()}
        if len(places) == 1:
            groups.setdefault(places.pop(), []).append(calls)
    cells = []
    for place, members in sorted(groups.items()):
        cell = {"threads": threads, "batch": shape[0], "sequence": shape[1]}
        about = {"processors": place} if place else {}
        systems = {n: ratio(members, n, next(iter(runners)), draw) for n in runners}
        cells.append({**cell, **about, "rounds": len(members), "systems": systems})
    return cells


def ratio(
    rounds: list[dict[str, Call]], name: str, first: str, draw: np.random.Generator
) -> dict[str, Any]:
    """Compute milliseconds, and the ratio to the first system with bounds of 95 %."""
    own = np.array([calls[name].milliseconds for calls in rounds])
    ratios = own / np.array([calls[first].milliseconds for calls in rounds])
    medians = np.median(draw.choice(ratios, (RESAMPLED, len(ratios))), axis=1)
    bounds = np.quantile(medians, [0.025, 0.975])
    rounded = [round(float(x), 3) for x in (np.median(ratios), *bounds)]
    return {"ms": round(float(np.median(own)), 2), "ratio": rounded}


if __name__ == "__main__":
    main()
