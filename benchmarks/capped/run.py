r"""Run a recipe for a language model under a cap of memory, and kill each stage once.

    python -m benchmarks.capped.run recipes/llama-3.2-1b-int4.yaml --shape 1B --cap-gb 8
    python -m benchmarks.capped.run recipes/qwen3-4b-int4.yaml --shape 4B --cap-gb 16
    python -m benchmarks.capped.run recipes/llama-3.2-1b-int4.yaml --shape 8B --cap-gb 16 \
      --until build --label GGUF --set 'quantize.methods=[rtn]' --set 'targets=[{runtime: gguf}]' \
      --set quantize.weights.group_size=32 --set quantize.head.group_size=32

The model is a checkpoint of random weights (benchmarks/decoders/scale.py), so the gates of quality
and speed get values that such a model can pass (GATES); all else is the recipe's. All stages run in
one control group, whose memory, pages of files included, the kernel limits: it kills what exceeds
that. Each stage is killed after a third of the time that `optimize plan` predicts for it, and then
run again to its end. A stage that ends earlier is not killed, and the table says so; nor is any
with --no-kill.

Needs root, for the control group. Finished stages stay in --work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.decoders.scale import JUDGED, SHAPES, STAGES, add_tokenizer, make_checkpoint
from benchmarks.measure import memory
from benchmarks.measure.results import RESULTS, ROOT, conditions, table, write

FIRST, SECOND = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")  # versions of control groups
POSITIONS = 8192  # of the checkpoint: the recipes read up to 4096 tokens
SHARE = 1 / 3  # of a stage's predicted time, after which it is killed
SOONEST = 0.5  # seconds into a stage
GATES = (  # that a random model can pass
    "validate.max_drop=1.0",
    "validate.max_kl=1.0",
    "validate.quantization_budget=1.0",
    "validate.latency.must_beat_float=false",
)


@dataclass(frozen=True)
class Cap:
    """Control group with a limit of memory. limited: file of its limit"""

    folder: Path
    limited: str

    @classmethod
    def make(cls, bytes_: int) -> Cap:
        """Make a group below the root. Exits where the kernel lets this user make none."""
        old = (FIRST / "memory.limit_in_bytes").exists()
        root, limited = (FIRST, "memory.limit_in_bytes") if old else (SECOND, "memory.max")
        cap = cls(root / f"optimize-{os.getpid()}", limited)
        try:
            cap.folder.mkdir()
            (cap.folder / limited).write_text(str(bytes_))
            if not old:
                (cap.folder / "memory.swap.max").write_text("0")
        except OSError as e:
            sys.exit(f"{cap.folder}: no control group can be made here ({e}); run as root")
        return cap

    def enclose(self, words: Sequence[str]) -> list[str]:
        """The command that runs `words` inside the group."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._processes), *words]

    def kill(self) -> None:
        """Kill all processes in the group."""
        for pid in self._processes.read_text().split():
            os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        """Remove the empty group."""
        self.folder.rmdir()

    @property
    def _processes(self) -> Path:
        return self.folder / "cgroup.procs"


@dataclass(frozen=True)
class Recipe:
    """Command line of one recipe, and the folder of its store."""

    file: Path
    work: Path
    changes: Sequence[str]

    def words(self, command: str, *more: str) -> list[str]:
        program = [sys.executable, "-m", "optimizer", "--json", command, str(self.file)]
        changes = [word for change in self.changes for word in ("--set", change)]
        return [*program, "--store", str(self.work / "store"), *changes, *more]

    def run(self, cap: Cap, stage: str, log: str) -> memory.Used:
        """Run up to a stage inside the cap."""
        more = ("--artifacts", str(self.work / "artifacts"), "--until", stage, "--ignore-estimate")
        return memory.run(cap.enclose(self.words("run", *more)), self.work / f"{log}.log")

    def plan(self) -> dict[str, float]:
        """{stage: predicted seconds of its first step}."""
        used = memory.run(self.words("plan"), self.work / "plan.log")
        if used.exit_code:
            sys.exit(f"plan: exit {used.exit_code}: {(self.work / 'plan.log').read_text()}")
        steps = [s for s in json.loads(used.output) if s["what"] == "run"]
        return {s["stage"]: float(s["seconds"]) for s in reversed(steps)}


def kill_after(cap: Cap, stage: Path, seconds: float, ended: threading.Event) -> None:
    """Kill the group `seconds` after a step of the stage began, unless the run `ended` earlier."""
    while not any(stage.glob("*.partial")):
        if ended.wait(0.01):
            return
    if not ended.wait(seconds):
        cap.kill()


def measure(recipe: Recipe, cap: Cap, last: str, kill: bool) -> dict[str, Any]:
    """Kill, if wanted, and finish each stage up to `last` that is not in the store; {stage:
    figures}."""
    predicted, stages = recipe.plan(), {}
    for stage in (s for s in STAGES[: STAGES.index(last) + 1] if s in predicted):
        after, ended = max(SOONEST, SHARE * predicted[stage]), threading.Event()
        arguments = (cap, recipe.work / "store" / stage, after, ended)
        killer = threading.Thread(target=kill_after, args=arguments)
        if not kill:
            ended.set()
        killer.start()
        first = recipe.run(cap, stage, f"{stage}-killed" if kill else stage)
        ended.set()
        killer.join()
        killed = kill and first.exit_code == -signal.SIGKILL
        second = recipe.run(cap, stage, stage) if killed else first
        if second.exit_code not in JUDGED:
            log = recipe.work / (f"{stage}-killed.log" if kill and not killed else f"{stage}.log")
            sys.exit(f"{stage}: exit {second.exit_code}\n{log.read_text()[-2000:]}")
        stages[stage] = {
            "killed_after": after if killed else None,
            "seconds": second.seconds,
            "anonymous": max(first.anonymous, second.anonymous),
            "exit_code": second.exit_code,
        }
        print(f"{stage}: {stages[stage]}", file=sys.stderr, flush=True)
    return stages


def page(result: Mapping[str, Any]) -> str:
    """Format the figures of all recipes."""
    when = result["conditions"]
    lines = [
        "# Recipes under a cap of memory, each stage killed once",
        "",
        f"{when['when']}, {when['machine'].get('cpu', 'unknown processor')}. Random weights; "
        "made by `python -m benchmarks.capped.run`. The kernel limits all memory of the run, pages "
        "of files included. Memory is the highest sum of anonymous memory of both runs of a stage. "
        "Seconds include the start of the command, beside other work. A stage that is absent was "
        "in the store.",
    ]
    for name, cell in result["cells"].items():
        lines += ["", f"## {name} within {cell['cap_gb']:g} GB", ""]
        changes = [f"`{change}`" for change in cell["set"]]
        lines += [f"Changed beside the gates: {', '.join(changes)}.", ""] if changes else []
        lines.append(stage_table(cell["stages"]))
    return "\n".join(lines) + "\n"


def stage_table(stages: Mapping[str, Any]) -> str:
    """Format one row per stage."""
    rows = [
        [
            name,
            "not killed" if s["killed_after"] is None else f"{s['killed_after']:,.1f}",
            f"{s['seconds']:,.1f}",
            f"{s['anonymous'] / 1e6:,.0f}",
            str(s["exit_code"]),
        ]
        for name, s in stages.items()
    ]
    heads = ["stage", "killed after s", "seconds of the run to its end", "memory MB", "exit"]
    return table(heads, rows)


def main(words: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--shape", choices=[*SHAPES], required=True)
    parser.add_argument("--cap-gb", type=float, required=True)
    parser.add_argument("--work", type=Path, default=ROOT / "artifacts" / "capped")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="last stage")
    parser.add_argument("--no-kill", action="store_true", help="run each stage once")
    parser.add_argument("--label", default="", help="end of the heading, such as: GGUF")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--results", action="store_true", help="write benchmarks/results/capped.*")
    options = parser.parse_args(None if words is None else list(words))
    load_before, name = os.getloadavg()[0], options.recipe.stem
    work = options.work.resolve() / f"{name}-{options.shape}"
    source = work / "checkpoint"
    if not source.is_dir():
        half = work / "checkpoint.partial"
        shutil.rmtree(half, ignore_errors=True)
        make_checkpoint(SHAPES[options.shape] | {"max_position_embeddings": POSITIONS}, half)
        add_tokenizer(half)
        half.rename(source)
    changes = [f"model.source={source}", *GATES, *options.set]
    cap = Cap.make(int(options.cap_gb * 1e9))
    try:
        recipe = Recipe(options.recipe, work, changes)
        stages = measure(recipe, cap, options.until, not options.no_kill)
    finally:
        cap.remove()
    print(stage_table(stages))
    if options.results:
        file = RESULTS / "capped.json"
        cells = json.loads(file.read_text())["cells"] if file.is_file() else {}
        key = " ".join(filter(None, [name, options.shape, options.label]))
        cells[key] = {"cap_gb": options.cap_gb, "set": options.set, "stages": stages}
        result = {"conditions": conditions(load_before, rounds=1, clock="wall"), "cells": cells}
        write(result, page(result), RESULTS, "capped")


if __name__ == "__main__":
    main()
