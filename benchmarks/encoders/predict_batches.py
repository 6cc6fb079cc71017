"""Time `predict --batch-size`: 1,000 lines through INT8 MiniLM, all batch sizes in one run.

    python -m benchmarks.encoders.predict_batches

Each system answers the same lines, in the windows and the batches that `predict` forms, through the
code that serves a bundle; "neighbours" are batches of lines in the order of the file. In each round
every system answers all lines once, in an order that rotates; ratios are taken within a round. The
median and a distribution-free interval of the ratios go to results/predict_batches.md, with the
padding: tokens computed over tokens of the texts. CPU seconds are of all threads together; use them
where other programs share the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.measure.models import lower_model
from benchmarks.measure.results import RESULTS, ROOT
from optimizer.foundation.progress import say
from optimizer.harness.bundle.bench import percentile, percentile_interval
from optimizer.harness.contract import read
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.tasks.answering import WINDOW, Answered, Predictor, Query, answer
from optimizer.recipe.file import read as read_recipe
from optimizer.store import Store

BASE = "batch 1"
System = Callable[[Predictor, Sequence[Query]], Iterator[Answered]]


def by_length(size: int) -> System:
    """Answer in batches of similar lengths within each window, as predict does."""

    def run(predictor: Predictor, asked: Sequence[Query]) -> Iterator[Answered]:
        for start in range(0, len(asked), WINDOW * size):
            yield from answer(predictor, asked[start : start + WINDOW * size], size)

    return run


def neighbours(size: int) -> System:
    """Answer in batches of lines in their order."""

    def run(predictor: Predictor, asked: Sequence[Query]) -> Iterator[Answered]:
        for start in range(0, len(asked), size):
            yield from answer(predictor, asked[start : start + size], size)

    return run


SYSTEMS = {
    BASE: by_length(1),
    "batch 8": by_length(8),
    "batch 32": by_length(32),
    "batch 32, neighbours": neighbours(32),
}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "minilm-int8.yaml")
    p.add_argument("--model", type=Path, help="an INT8 ONNX file or a bundle instead of a run")
    p.add_argument("--store", type=Path, default=ROOT / "artifacts" / "store")
    p.add_argument("--out", type=Path, default=RESULTS)
    p.add_argument("--lines", type=int, default=1000)
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--threads", type=int, nargs="+", default=[1])
    args = p.parse_args()
    source, lowered = lower_model(read_recipe(args.recipe), Store(args.store), args.model)
    model = lowered.onnxruntime
    contract = read(source.path / "contract.json")
    rows = (ROOT / "calibration" / "sentiment-evaluate.jsonl").read_text().split("\n")
    texts = [json.loads(row)["text"] for row in rows if row][: args.lines]
    asked = [Query(f"line {i}", text) for i, text in enumerate(texts, 1)]
    load = os.getloadavg()[0]
    parts = []
    for threads in args.threads:
        with OrtRunner(model, threads=threads) as runner:
            tokenizer = load_tokenizer(source.path / "checkpoint", contract)
            predictor = Predictor(contract, tokenizer, runner.infer)
            padding = {name: padded(predictor, run, asked) for name, run in SYSTEMS.items()}
            times = timed(predictor, asked, args.rounds)
        parts.append(table(threads, times, padding))
    machine = describe_machine()
    text = (
        f"# predict, {len(texts):,} lines by batch size\n\n"
        f"`python -m benchmarks.encoders.predict_batches`, {datetime.now(UTC):%Y-%m-%d}, "
        f"{machine.cpu}, "
        f"{machine.cores} cores, load average {load:.1f} when it began. Medians of "
        f"{args.rounds} rounds, 95 % intervals; ratios below 1 are faster than {BASE}.\n\n"
        + "\n".join(parts)
    )
    (args.out / "predict_batches.md").write_text(text)
    print(text)


def padded(predictor: Predictor, run: System, asked: Sequence[Query]) -> float:
    """Compute tokens computed over tokens of the texts; it warms the system up as well."""
    computed = 0

    def infer(arrays):  # type: ignore[no-untyped-def]
        nonlocal computed
        computed += arrays["input_ids"].size
        return predictor.infer(arrays)

    counted = Predictor(predictor.contract, predictor.encoder, infer)
    kept = sum(a.kept or 0 for a in run(counted, asked))
    return computed / kept


def timed(
    predictor: Predictor, asked: Sequence[Query], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Time (wall, CPU) seconds of each system and round."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
    names = list(SYSTEMS)
    for number in range(rounds):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            wall, cpu = time.perf_counter(), time.process_time()
            answers = sum(1 for _ in SYSTEMS[name](predictor, asked))
            assert answers == len(asked)
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        say(f"round {number + 1} of {rounds}")
    return times


def table(
    threads: int,
    times: dict[str, list[tuple[float, float]]],
    padding: dict[str, float],
) -> str:
    lines = [
        f"{threads} thread{'s' if threads > 1 else ''}:",
        "",
        "| | tokens computed per token | wall s | of batch 1 | CPU s | of batch 1 |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in times.items():
        cells = []
        for which in (0, 1):
            own = [r[which] for r in runs]
            ratios = [r[which] / base[which] for r, base in zip(runs, times[BASE], strict=True)]
            low, high = ("?" if e is None else f"{e:.2f}" for e in percentile_interval(ratios, 50))
            cells += [
                f"{percentile(own, 50):.2f}",
                "1" if name == BASE else f"{percentile(ratios, 50):.2f} ({low} to {high})",
            ]
        lines.append(f"| {name} | {padding[name]:.2f} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
