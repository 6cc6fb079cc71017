"""Count how often the ledger refuses a clean run, and how near the other runs come to its limits.

    python -m benchmarks.ledger.false_alarms --cells 300 --jobs 2      # about an hour of two cores
    python -m benchmarks.ledger.false_alarms --cells 20  # the first of them, for a first look

A cell is a clean run of the stages from load to the ledger, drawn from models × methods × schemes ×
ranges × seeds × dialects × processor personalities (false_alarm_cells.py; the same --seed gives the
same cells, and fewer are a prefix of more). It runs in two processes, compress to build and the
ledger, each with the environment of the processor that it is to detect; they are forked from one
that has imported everything (false_alarm_worker.py).

--work holds finished parts, models and float graphs, so that a run that was stopped resumes. After
a change of optimizer/ the parts are run again.

Writes false_alarms.json and .md to --results. Exits 3 when a run was refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.ledger.false_alarm_cells import ATEN, ATEN_NEEDS, AXES, SMOLLM2, Cell, cells
from benchmarks.ledger.false_alarm_table import markdown, summary
from benchmarks.measure.results import ROOT, cpu_flags, machine
from optimizer.foundation.progress import bar, say

LIMIT = 1200  # seconds of one part of a cell; it takes ten to twenty
REFUSED = 3


def code() -> str:
    """A digest of what a row depends on: the product, and what a cell and a model are."""
    files = [
        *(ROOT / "optimizer").rglob("*.py"),
        *Path(__file__).parent.glob("false_alarm_[cmw]*.py"),
    ]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


class Worker:
    """Process of false_alarm_worker.py, started at the first call and again after it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, do: str, cell: Cell, log: Path, **paths: Path) -> tuple[str, float]:
        """Run a part; return (why it failed, with the end of its output, or "", CPU seconds)."""
        request = {
            "do": do,
            "cell": asdict(cell),
            "environment": {} if do == "model" else cell.environment(do),
            "limit": LIMIT,
            "log": str(log),
            **{name: str(path) for name, path in paths.items()},
        }
        answer = self._asked(json.dumps(request))
        if answer["status"] == 0:
            return "", answer["cpu"]
        if answer["status"] == -signal.SIGALRM:
            return f"it did not end within {LIMIT} s", answer["cpu"]
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        last = " / ".join(text.strip().splitlines()[-3:])
        return f"it ended with {answer['status']}: {last}", answer["cpu"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _asked(self, request: str) -> dict[str, Any]:
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return dict(json.loads(line))
        self._process = None
        return {"status": process.wait(), "cpu": 0.0}

    @staticmethod
    def _started() -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        plain = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path}
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ledger.false_alarm_worker"],
            env={**os.environ, **plain},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


class Models:
    """Load stage's folders by model and seed, each made at the first call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def source(self, cell: Cell, worker: Worker) -> Path:
        """Find or make a folder. Raises RuntimeError with the last output of the process."""
        name = f"{cell.model}-{cell.seed}"
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            made = self._folder / name
            if not made.is_dir():
                wrong, _ = worker.run("model", cell, self._folder / f"{name}.log", source=made)
                if wrong:
                    raise RuntimeError(f"{cell.model} could not be made: {wrong}")
            return made


def run_cell(cell: Cell, models: Models, work: Path, worker: Worker) -> dict[str, Any]:
    """Run a cell and return its row.

    work: folder of this version of the code, with finished parts of cells, and float graphs
    """
    source = models.source(cell, worker)
    folder = work / cell.key
    row: dict[str, Any] = {"key": cell.key, "cell": asdict(cell), "refused": None, "ratios": []}
    started, cpu = time.monotonic(), 0.0
    stages: dict[str, float] = {}
    for part in ("compress", "validate"):
        made = folder / f"{part}.json"
        if not made.is_file():
            if part == "compress":
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            places = {"source": source, "folder": folder, "graphs": work / "graphs"}
            wrong, used = worker.run(part, cell, folder / "log.txt", **places)
            cpu += used
            if wrong:
                row["refused"] = {"stage": part, "hop": "", "kind": "crash", "messages": [wrong]}
                break
        found = json.loads(made.read_text(encoding="utf-8"))
        stages |= found.pop("seconds")
        row |= found
        if row["refused"]:
            break
    seconds = round(time.monotonic() - started, 1)
    row |= {"seconds": seconds, "cpu_seconds": round(cpu, 1), "stages": stages}
    shutil.rmtree(folder)
    return row


def finished(file: Path, version: str) -> dict[str, dict[str, Any]]:
    """Read {key: row} of this version of the code; a line that a kill cut short is skipped."""
    rows: dict[str, dict[str, Any]] = {}
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["code"] == version:
            rows[row["key"]] = row
    return rows


def run(chosen: Sequence[Cell], work: Path, jobs: int) -> list[dict[str, Any]]:
    """Run all cells and return their rows in order; append each to work/rows.jsonl as it ends."""
    version, file = code(), work / "rows.jsonl"
    models = Models(work / "models")
    _remove_other_code(work / "running", version)
    rows = finished(file, version)
    left = [c for c in chosen if c.key not in rows]
    say(f"false alarms: {len(chosen) - len(left)} of {len(chosen)} cells are finished already")
    workers = [Worker() for _ in range(jobs)]
    idle: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def row_of(cell: Cell) -> dict[str, Any]:
        worker = idle.get()
        try:
            return run_cell(cell, models, work / "running" / version, worker)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(jobs) as pool, file.open("a", encoding="utf-8") as out:
        if out.tell() and not file.read_bytes().endswith(b"\n"):
            out.write("\n")  # after a line that a kill cut short
        running = [pool.submit(row_of, c) for c in left]
        for done in bar(as_completed(running), "false alarms", total=len(left)):
            row = done.result() | {"code": version}
            rows[row["key"]] = row
            out.write(json.dumps(row) + "\n")
            out.flush()
            if row["refused"]:
                say(f"{row['key']} {Cell(**row['cell']).title}: {told(row['refused'])}")
    for worker in workers:
        worker.close()
    if left:
        say(f"false alarms: {_cpu_seconds() / len(left):.1f} CPU seconds a cell, models included")
    return [rows[c.key] for c in chosen]


def _remove_other_code(running: Path, version: str) -> None:
    """Remove files of cells that were stopped under other code; nothing resumes them."""
    for folder in running.iterdir() if running.is_dir() else ():
        if folder.name != version:
            shutil.rmtree(folder)


def _cpu_seconds() -> float:
    """Sum user and system seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def told(refused: dict[str, Any]) -> str:
    """Describe a refusal in one line."""
    at = refused["hop"] or refused["stage"]
    first = refused["messages"][0] if refused["messages"] else "out of tolerance"
    return f"{refused['kind']} at {at}: {first[:300]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the sample of cells")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--work", type=Path, default=ROOT / "artifacts" / "false_alarms")
    parser.add_argument("--results", type=Path, help="a folder for false_alarms.json and .md")
    names = (*AXES["model"], SMOLLM2)
    chosen_models = f"repeatable; without it all but {SMOLLM2}, whose cells take minutes"
    parser.add_argument("--model", action="append", default=[], choices=names, help=chosen_models)
    parser.add_argument("--only", default="", help="keys of cells, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the cells and end")
    args = parser.parse_args()
    flags = {"default", *cpu_flags()}
    aten = [a for a in ATEN if ATEN_NEEDS.get(a, a) in flags]
    chosen = cells(args.cells, args.seed, args.model, aten)
    if args.only:
        wanted = args.only.split(",")
        chosen = [c for c in chosen if c.key in wanted]
        missing = sorted(set(wanted) - {c.key for c in chosen})
        if missing:
            sys.exit(f"--only: {missing[0]} is none of the {args.cells} cells of this --seed")
    if args.list:
        print("\n".join(f"{c.key} {c.title}; {c.personalities}" for c in chosen))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
    rows = run(chosen, args.work, args.jobs)
    about = {
        "machine": machine() | {"flags": cpu_flags()},
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.ledger.false_alarms"
        + f" --cells {args.cells} --seed {args.seed}"
        + "".join(f" --model {name}" for name in args.model),
        "jobs": args.jobs,
        "code": code(),
    }
    document = summary(rows, about)
    page = markdown(document)
    results = args.results or args.work
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (results / "false_alarms.json").write_text(text + "\n", encoding="utf-8")
    (results / "false_alarms.md").write_text(page, encoding="utf-8")
    print(page)
    sys.exit(REFUSED if document["refused"] else 0)


if __name__ == "__main__":
    main()
