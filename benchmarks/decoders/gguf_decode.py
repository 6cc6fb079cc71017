"""Time decoding of GGUF files in llama.cpp, ours and its own Q4_0, over many copies of each file.

    python -m benchmarks.decoders.gguf_decode OURS.gguf THEIRS.gguf --llama LIBRARY [--copies 8]

The place of a file's pages in memory changes its speed by several per cent: a byte-identical copy
is faster or slower than the file itself. Each file is therefore copied --copies times. Each
pair of copies is opened in new processes, in an order that rotates, takes turns for some rounds,
and counts once, as the mean of the logarithms of the ratios of its rounds. The interval is
Student's over the pairs. A third system, another copy of theirs, shows the comparison of a file
with itself. Writes results/gguf_decode.md and .json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.decoders.llm_decode import LLAMA, SCRIPT, TOKENS, WARMUP
from benchmarks.measure.processes import System, Worker
from benchmarks.measure.results import RESULTS, conditions, write
from optimizer.foundation.progress import say
from optimizer.harness.bundle.bench import percentile

OURS, THEIRS, AGAIN = "ours", "theirs", "theirs again"
RATIOS = ((OURS, THEIRS), (OURS, AGAIN), (AGAIN, THEIRS))
PROMPT = 128


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("ours", type=Path)
    p.add_argument("theirs", type=Path)
    p.add_argument("--llama", type=Path, required=True, help="folder of libllama")
    p.add_argument("--page-only", action="store_true", help="of the figures that are there")
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--copies", type=int, default=8)
    p.add_argument("--rounds", type=int, default=4)
    p.add_argument("--out", type=Path, default=RESULTS / "gguf_decode.json")
    asked = p.parse_args()
    if asked.page_only:
        asked.out.with_suffix(".md").write_text(page(json.loads(asked.out.read_text())))
        return
    load = os.getloadavg()[0]
    cells = {str(n): measured(asked, n) for n in asked.threads}
    result = conditions(load, asked.rounds, "wall") | {"llama.cpp": LLAMA, "threads": cells}
    write(result, page(result), asked.out.parent, asked.out.stem)


def measured(asked: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Measure {"pairs": ms of each round by system}."""
    pairs: list[dict[str, list[float]]] = []
    for i in range(asked.copies):
        say(f"threads {threads}: copies {i + 1} of {asked.copies}")
        pairs.append(pair(asked, threads, i))
    return {"pairs": pairs}


def page(result: Mapping[str, Any]) -> str:
    """Format the ratios, and machine and versions."""
    rows = []
    for threads, cell in result["threads"].items():
        pairs = cell["pairs"]
        for one, other in RATIOS:
            logs = [
                mean(math.log(a / b) for a, b in zip(times[one], times[other], strict=True))
                for times in pairs
            ]
            ratio, low, high = (math.exp(x) for x in bounds(logs))
            ms = [percentile([t for times in pairs for t in times[n]], 50) for n in (one, other)]
            rows.append(
                f"| {threads} | {one} / {other} | {ratio:.3f} ({low:.3f} to {high:.3f}) "
                f"| {ms[0]:.2f} | {ms[1]:.2f} | {len(pairs)} |"
            )
    machine = result["machine"]
    return "\n".join(
        [
            "# Our Q4_0 and llama.cpp's own in llama.cpp",
            "",
            "Written by `benchmarks/decoders/gguf_decode.py`; its head says how. Time per token "
            "after a",
            f"prompt of {PROMPT}, batch 1; in brackets 95 %, over pairs of copies. `theirs again`:",
            "another copy of llama.cpp's own file.",
            "",
            "| threads | | ratio of times | ms | ms | copies |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"{machine['cpu']}, {machine['cores']} processors, {result['when']}; "
            f"{result['llama.cpp']}; load average {result['load_average']} before and after.",
            "",
        ]
    )


def pair(asked: argparse.Namespace, threads: int, number: int) -> dict[str, list[float]]:
    """Time new copies as {system: ms per token of each round}."""
    files = [(OURS, asked.ours), (THEIRS, asked.theirs), (AGAIN, asked.theirs)]
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, file in files[number % 3 :] + files[: number % 3]:
                copy = Path(shutil.copyfile(file, Path(folder) / f"{name}.gguf"))
                system = System(name, name, "llama", copy, {"library": str(asked.llama)})
                workers[name] = Worker(system, threads, SCRIPT)
                workers[name].ask(prompt=PROMPT, tokens=WARMUP, seed=0)
            names, times = list(workers), {n: list[float]() for n in workers}
            for r in range(asked.rounds):
                for name in names[r % 3 :] + names[: r % 3]:
                    reply = workers[name].ask(prompt=PROMPT, tokens=WARMUP + TOKENS, seed=r + 1)
                    times[name].append(percentile(reply["ms"][WARMUP:], 50))
        finally:
            for worker in workers.values():
                worker.close()
    return times


def bounds(values: Sequence[float]) -> tuple[float, float, float]:
    """Compute the mean and its 95 % interval (Student)."""
    from scipy.stats import t

    middle = mean(values)
    width = t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return middle, middle - width, middle + width


if __name__ == "__main__":
    main()
