"""ONNX files of one encoder timed in turns in one process, as ratios within each round.

    python benchmarks/encoder_paired.py ours=BUNDLE/model/onnxruntime-cpu/model.onnx \\
        float=FLOAT.onnx --dynamic FLOAT.onnx --out benchmarks/results/encoder_paired.json

--dynamic adds ONNX Runtime's quantize_dynamic of a float file as `dynamic`, which the others are
divided by; else the first is. All have the session options of optimizer/harness/runtimes/ort/run.py
and the same random tokens, no padding. The order is random in each round; each call is timed after
one of the same session that is not, as another one's memory has taken the caches.

encoder_int8.py times each system in a process of its own, with quality beside it. On two threads a
machine of two virtual processors has hours, and minutes, in which elementwise operators of two
threads take two to five times as long; only turns of a round see the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.harness.machine import this_machine
from optimizer.harness.runtimes.ort.run import OrtRunner

SEQUENCE = 128
RESAMPLED = 2000


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("models", nargs="+", metavar="NAME=FILE")
    p.add_argument("--dynamic", type=Path, metavar="FLOAT.onnx")
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    p.add_argument("--rounds", type=int, default=60, help="at batch 1; of others a third")
    p.add_argument("--vocabulary", type=int, default=30_000)
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    files = {name: Path(file) for name, _, file in (m.partition("=") for m in args.models)}
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as scratch:
        if args.dynamic:
            files = {"dynamic": dynamic(args.dynamic, Path(scratch) / "dynamic.onnx"), **files}
        cells = [
            timed(files, threads, batch, args.rounds if batch == 1 else args.rounds // 3, args)
            for threads in args.threads
            for batch in args.batches
        ]
    result = {
        "machine": this_machine().to_json(),
        "load": load,
        "sequence": SEQUENCE,
        "cells": cells,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


def dynamic(file: Path, out: Path) -> Path:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(file, out, per_channel=True)
    return out


def timed(
    files: dict[str, Path], threads: int, batch: int, rounds: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds, and each system's ratio to the first with bounds of 95 %."""
    draw, order = np.random.default_rng(0), random.Random(0)
    shape = (batch, SEQUENCE)
    arrays = {
        "input_ids": draw.integers(999, args.vocabulary, shape),
        "attention_mask": np.ones(shape, np.int64),
        "token_type_ids": np.zeros(shape, np.int64),
    }
    runners = {n: OrtRunner(f, device="cpu", threads=threads) for n, f in files.items()}
    times: dict[str, list[float]] = {n: [] for n in files}
    for _ in range(rounds):
        for name in order.sample(list(files), len(files)):
            feed = {n: arrays[n] for n in runners[name].inputs}
            runners[name].infer(feed)
            start = time.perf_counter()
            runners[name].infer(feed)
            times[name].append(1e3 * (time.perf_counter() - start))
    first = np.array(times[next(iter(files))])
    cell: dict[str, Any] = {"threads": threads, "batch": batch, "rounds": rounds, "systems": {}}
    for name, own in times.items():
        ratios = np.array(own) / first
        medians = np.median(draw.choice(ratios, (RESAMPLED, rounds)), axis=1)
        bounds = np.quantile(medians, [0.025, 0.975])
        ratio = [round(float(x), 3) for x in (np.median(ratios), *bounds)]
        cell["systems"][name] = {"ms": round(float(np.median(own)), 2), "ratio": ratio}
    return cell


if __name__ == "__main__":
    main()
