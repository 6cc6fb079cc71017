"""Sessions of one and the same model, timed in turns: no two should be called different.

    python -m benchmarks.encoders.equal_sessions recipes/minilm-int8.yaml [--sequence 128]

The recipe's first target is lowered, and opened --sessions times. Printed are the median of each
session in one long opening, and how many pairs the interval of single rounds calls different, at
95 %; then, --repeat times, the ratio of two systems of this one model by openings
(timing/stopping_rules.py), and how often that calls them different.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from optimizer import pipeline
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.bundle import bench
from optimizer.recipe import file as recipe_file
from optimizer.store import Store
from optimizer.timing.stopping_rules import CONFIDENCE, RatioQuestion, SequentialTest
from optimizer.validate.target_runner import open_onnx
from optimizer.validate.timing.batch_timing import WARMUP, BatchTimer, make_system
from optimizer.validate.timing.cells import CANDIDATE, TimingComparison
from optimizer.validate.timing.openings import Openings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each repetition")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("artifacts/equal_sessions"))
    options = parser.parse_args()
    recipe, store = recipe_file.read(options.recipe), Store(options.work / "store", until="lower")
    pipeline.run(recipe, store)
    folders = {step["stage"]: Path(step["path"]) for step in reversed(store.log)}
    contract = contracts.read(folders["load"] / "contract.json")
    inputs = tasks.look_up(contract).inputs
    encoder, texts = inputs.open(folders["load"] / "checkpoint", contract), inputs.neutral(contract)

    def opener() -> Any:
        file = folders["lower"] / "model.onnx"
        return open_onnx(recipe.targets[0], file, contract, options.threads)

    def systems(openings: Openings, names: list[str]) -> dict[str, bench.System]:
        openings.open()
        return {n: make_system(openings.runner(n).infer, contract, encoder) for n in names}

    names = [f"session {i}" for i in range(1, options.sessions + 1)]
    openings = Openings(dict.fromkeys(names, opener))
    latency, cell = recipe.validate_.latency, (1, options.sequence)
    measured = bench.measure(
        systems(openings, names), [cell], texts, iterations=options.rounds, warmup=WARMUP
    )
    openings.close()
    times = {n: s["end_to_end"]["samples"] for n, s in measured["cells"][0]["systems"].items()}
    for name, own in times.items():
        print(f"{name}: {np.median(own):.4f} ms")
    pairs = [bench.compare_times(times[a], times[b])["interval"] for a, b in combinations(names, 2)]
    apart = sum(not low <= 1 <= high for low, high in pairs)
    print(f"by rounds of one opening: {apart} of {len(pairs)} pairs are called different")
    apart = 0
    for _ in range(options.repeat):
        openings = Openings(dict.fromkeys(("equal", CANDIDATE), opener))
        timer = BatchTimer(texts, latency, options.threads, openings)
        rule = SequentialTest(
            RatioQuestion.share_rounds(1.0, latency.iterations), latency.iterations, options.seconds
        )
        compared = TimingComparison(timer, rule, "equal")
        both = systems(openings, ["equal", CANDIDATE])
        timer.time(both, cell, "equal", compared.more, compared.opening)
        openings.close()
        ratio = compared.ratio("equal", CONFIDENCE)
        low, high = rule.interval
        print(f"{ratio['median']:.4f} ({low:.4f} to {high:.4f}), {rule.looks[-1].rounds} openings")
        apart += rule.decided
    print(f"by openings: {apart} of {options.repeat} are called different")


if __name__ == "__main__":
    main()
