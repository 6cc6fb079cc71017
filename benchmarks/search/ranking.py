"""Rank 64 candidates of INT8 MiniLM by the times that a search predicts, and by measured ones.

    python -m benchmarks.search.ranking [--rounds 40] [--work FOLDER] [--results benchmarks/results]

The subspace is exhaustive: each of the six kinds of linear layers of the encoder is INT8 or float
in all blocks. Every candidate is built as a trial of `optimize search` builds it, from one float
graph, because rounding to nearest replaces no parameter of it; the candidate without any INT8
module is that graph. All sessions are open in one process with one thread. In each round every
candidate runs once, in a random order, after an untimed run of its own; a time is the processor
time of that run.

Two predictions are compared with the medians:

    search          expectation.py before any trial: by the share of the weights in float
    search --times  kernel_times.py: by a table that this run measures, as `optimize measure RECIPE`
                    does

Kendall's tau-a counts a pair that is predicted alike as neither right nor wrong. It has no
interval: noise of the times lowers tau on average, so that resampled rounds give lower values.
Two figures show the noise, as means over random divisions of the rounds: the same tau by half of
the rounds, and tau of one half with the other. The ratio of two candidates is the median over
rounds, with an interval between order statistics (95 %).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import results
from benchmarks.measure.results import ROOT
from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.foundation.progress import say
from optimizer.harness.bundle.bench import percentile, percentile_interval
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.lower.stage import STAGE as LOWER
from optimizer.recipe import file as recipe_file
from optimizer.search import candidates, kernel_times
from optimizer.search.candidates import Candidate, derive_recipe
from optimizer.search.expectation import Expectation, kendall_tau
from optimizer.search.stages import sensitivity
from optimizer.search.workbench import BuiltCandidate, Workbench
from optimizer.store import Store

KINDS = {
    "query": "*.query",
    "key": "*.key",
    "value": "*.value",
    "attention output": "*.attention.output.dense",
    "first of MLP": "*.intermediate.dense",
    "second of MLP": "encoder.layer.?.output.dense",
}
OVERRIDES = (
    "quantize.method=rtn",
    "quantize.bias_correction=false",
    "calibrate.samples=16",
    "targets=[{runtime: onnxruntime, device: cpu, threads: 1}]",
    "validate.latency.must_beat_float=false",
    "validate.latency.batch=[1]",
    "search={over: {method: [rtn]}}",
)
SHAPE = (1, 128)  # the first cell of the recipe
TABLE_SECONDS = 15
DIVISIONS = 100  # of the rounds into two halves
HEADS = [
    "predicted by",
    "Kendall's tau with measured",
    "by half of the rounds",
    "at most (candidates predicted alike)",
    "median error of a ratio",
]
FASTER = 0.92  # time / the recipe's: 8 % less

Kept = tuple[str, ...]
Times = Any  # float64 (candidates, rounds): ms


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "minilm-int8.yaml")
    p.add_argument("--rounds", type=int, default=40)
    p.add_argument("--work", type=Path, default=Path("artifacts/ranking"), help="store and table")
    p.add_argument("--results", type=Path, help="folder for search_ranking.json and .md")
    asked = p.parse_args()
    load, started = os.getloadavg()[0], time.process_time()
    recipe = recipe_file.read(asked.recipe, OVERRIDES)
    first = candidates.list_candidates(recipe)[0]
    bench = Workbench(recipe, asked.work / "store", first)
    table = asked.work / "table.json"
    document = kernel_times.measure(recipe, bench.root, TABLE_SECONDS, None)
    table.write_text(json.dumps(document))
    own = bench.build(first)
    known = kernel_times.read(table, None, own)
    known = replace(
        known, p50=known.forward
    )  # the candidates are timed without tokenizer and pooling
    files = build(bench, own, [*known.own])
    times = measure(files, asked.rounds)
    predicted = {
        "search": by_share(bench, own, list(files)),
        "search --times": [known.figures(kept)["ratio"] for kept in files],
    }
    measured = summary(times, predicted, [*files])
    conditions = results.conditions(load, asked.rounds, "cpu")
    conditions["processor_seconds"] = round(time.process_time() - started)
    page = show(measured, conditions)
    if asked.results:
        results.write(conditions | measured, page, asked.results, "search_ranking")
    else:
        print(page)


def build(bench: Workbench, own: BuiltCandidate, modules: Sequence[str]) -> dict[Kept, Path]:
    """{modules in float: ONNX file} of every candidate, the recipe's first."""
    kinds = [[m for m in modules if fnmatchcase(m, pattern)] for pattern in KINDS.values()]
    store, steps = Store(bench.root), own.artifacts
    files: dict[Kept, Path] = {}
    for chosen in product((False, True), repeat=len(kinds)):
        kept = tuple(m for kind, yes in zip(kinds, chosen, strict=True) if yes for m in kind)
        if not all(chosen):
            candidate = Candidate(0, bench.first.methods, finer=0.5 if kept else 0.0)
            recipe = derive_recipe(bench.recipe, candidate, kept)
            state = store.step(COMPRESS, recipe.compression, steps.base)
            model = store.step(LOWER, recipe.targets[0], steps.base, state, steps.graph)
        else:
            model = steps.graph
        files[kept] = model.path / "model.onnx"
        say(f"ranking: {len(files)} of {2 ** len(kinds)} candidates")
    return files


def measure(files: Mapping[Kept, Path], rounds: int) -> Times:
    """Processor time of each candidate in each round."""
    draw, order = np.random.default_rng(0), random.Random(0)
    arrays = {
        "input_ids": draw.integers(999, 30_000, SHAPE),
        "attention_mask": np.ones(SHAPE, np.int64),
        "token_type_ids": np.zeros(SHAPE, np.int64),
    }
    times = np.zeros((len(files), rounds))
    with ExitStack() as opened:
        runners = [opened.enter_context(OrtRunner(f, threads=1)) for f in files.values()]
        for number in range(rounds):
            say(f"ranking: round {number + 1} of {rounds}")
            for i in order.sample(range(len(runners)), len(runners)):
                feed = {name: arrays[name] for name in runners[i].inputs}
                runners[i].infer(feed)
                start = time.process_time()
                runners[i].infer(feed)
                times[i, number] = 1e3 * (time.process_time() - start)
    return times


def by_share(bench: Workbench, own: BuiltCandidate, every: Sequence[Kept]) -> list[float]:
    """Times / the recipe's, as a search expects them before any trial."""
    section = sensitivity.make_section(bench.recipe.compression)
    step = Store(bench.root).step(sensitivity.STAGE, section, own.artifacts.base)
    modules = json.loads((step.path / sensitivity.FILE).read_text("utf-8"))
    whole = sum(m["weights"] for m in modules.values())
    shares = [sum(modules[name]["weights"] for name in kept) / whole for kept in every]
    candidates = [Candidate(0, bench.first.methods, finer=share) for share in shares]
    return Expectation(modules, {}, (), "latency").objectives(candidates)


def summary(
    times: Times, predicted: Mapping[str, Sequence[float]], every: Sequence[Kept]
) -> dict[str, Any]:
    """Kendall's tau of each prediction, the noise floor, and the times."""
    generator = np.random.default_rng(0)
    medians, rounds = np.median(times, axis=1), times.shape[1]
    mixed = [generator.permutation(rounds) for _ in range(DIVISIONS)]
    divided = [[np.median(times[:, h], axis=1) for h in np.array_split(m, 2)] for m in mixed]
    fastest = min(range(1, len(medians)), key=lambda i: float(medians[i]))
    against = times[fastest] / times[0]
    taus = {}
    for name, values in predicted.items():
        errors = np.abs(np.array(values) / (medians / medians[0]) - 1)
        taus[name] = {
            "tau": tau(values, medians),
            "by_half": float(np.mean([tau(values, half) for both in divided for half in both])),
            "most": tau(values, values),  # pairs that are predicted alike count 0
            "median_error": float(np.median(errors)),
        }
    return {
        "candidates": len(medians),
        "shape": SHAPE,
        "tau": taus,
        "noise_floor": float(np.mean([tau(*both) for both in divided])),
        "fastest_other": {
            "kept": kinds_of(every[fastest]),
            "median": percentile(against, 50),
            "interval": percentile_interval(against, 50),
        },
        "times": [
            {
                "kept": kinds_of(kept),
                "ms": round(float(ms), 3),
                **{name: round(values[i], 4) for name, values in predicted.items()},
            }
            for i, (kept, ms) in enumerate(zip(every, medians, strict=True))
        ],
    }


def tau(one: Sequence[float], other: Sequence[float]) -> float:
    value = kendall_tau(list(zip(one, other, strict=True)))
    assert value is not None
    return value


def kinds_of(kept: Kept) -> list[str]:
    return [n for n, pattern in KINDS.items() if any(fnmatchcase(m, pattern) for m in kept)]


def show(measured: Mapping[str, Any], conditions: Mapping[str, Any]) -> str:
    """Page with the figures."""
    rows = [
        [
            f"`{name}`",
            *(f"{one[key]:.3f}" for key in ("tau", "by_half", "most")),
            f"{one['median_error']:.1%}",
        ]
        for name, one in measured["tau"].items()
    ]
    other = measured["fastest_other"]
    low, _ = other["interval"]
    least = measured["times"][0]["ms"], max(t["ms"] for t in measured["times"])
    verdict = "perhaps a candidate" if low is None or low <= FASTER else "no candidate"
    machine = conditions["machine"]
    return f"""# Candidates of MiniLM ranked by predicted and by measured time

Made by `python -m benchmarks.search.ranking`. {measured["candidates"]} candidates: each of six
kinds of linear layers INT8 or float in all blocks. Processor time of the model at 1 x {SHAPE[1]}
tokens on one thread, median over {conditions["rounds"]} rounds,
from {least[0]:.1f} to {least[1]:.1f} ms.

{results.table(HEADS, rows)}

Noise of the times lowers tau on average, as half of the rounds shows. Tau of one half with the
other is {measured["noise_floor"]:.3f}. Both are means of {DIVISIONS} divisions.

The fastest candidate beside the recipe itself keeps {", ".join(other["kept"])} in float and takes
{results.with_interval(other)} of its time: {verdict} of these is 8 % faster than the recipe.

{conditions["when"]}, {machine["cpu"]}, {", ".join(machine["flags"])}; load average
{conditions["load_average"]}; {conditions["processor_seconds"]} s of processor time.
"""


if __name__ == "__main__":
    main()
