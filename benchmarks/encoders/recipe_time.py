"""Time a recipe stage by stage, in wall and processor seconds.

    python -m benchmarks.encoders.recipe_time recipes/minilm-int8.yaml \\
        --target '{runtime: onnxruntime}'

Each stage runs in a process `optimize run --until STAGE` on the store of the stages before it. The
time of `optimize --help` is subtracted from it as the time of starting. The last row is one run of
all stages with an empty store, the time that a user waits.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

STAGES = ("load", "compress", "export", "lower", "build", "validate", "package")


def seconds(words: Sequence[str]) -> tuple[float, float]:
    """Measure wall and processor seconds of one `optimize`."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "optimizer", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"exit {done.returncode} of optimize {' '.join(words)}\n{done.stderr.decode()}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--target", help="the only target; absent: those of the recipe")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    args = parser.parse_args()
    overrides = [word for each in args.set for word in ("--set", each)]
    overrides += ["--set", f"targets=[{args.target}]"] if args.target else []
    print(f"{args.recipe}, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print("| stage | wall s | processor s |\n|---|---|---|", flush=True)
    seconds(["--help"])  # loads files into the page cache
    start = seconds(["--help"])
    total = [0.0, 0.0]
    with tempfile.TemporaryDirectory() as folder:

        def run(store: str, *words: str) -> tuple[float, float]:
            places = ["--store", f"{folder}/{store}", "--artifacts", f"{folder}/artifacts"]
            return seconds(["run", args.recipe, *overrides, *places, *words])

        for stage in STAGES:
            used = [a - b for a, b in zip(run("stages", "--until", stage), start, strict=True)]
            total = [a + b for a, b in zip(total, used, strict=True)]
            print(f"| {stage} | {used[0]:.1f} | {used[1]:.1f} |", flush=True)
        print(f"| sum | {total[0]:.1f} | {total[1]:.1f} |", flush=True)
        wall, used_at_once = run("at once", "--until", "package")
        print(f"| all at once | {wall:.1f} | {used_at_once:.1f} |")


if __name__ == "__main__":
    main()
