"""Suite of checks and timings on one GPU, in one command of twelve minutes.

    python -m benchmarks.gpu.suite             # writes benchmarks/results/gpu-<name>.json
    python -m benchmarks.gpu.suite --source minilm-int8=FOLDER  # checkpoint that is not installed
    python -m benchmarks.gpu.suite --rehearse  # tiny models, and parts that run without a GPU
    python -m benchmarks.gpu.suite --only vllm:fp8  # this part and those whose files it reads

Needs no network, and none of tensorrt, tensorrt_rtx, onnxruntime-gpu and torch: a part whose
package is missing says so. Every part of plan.PARTS is in the JSON, in this order:

    {"suite": 2, "rehearsal": bool, "machine": {...}, "seconds": n,
     "parts": {name: {"status": "ran", "seconds": n, "result": {...}}
                   | {"status": "failed", "seconds": n, "why": ..., "result": the finished cells}
                   | {"status": "not run", "why": what is missing: GPU, package, file or time}}}

A part fails when it stops with an error, when its answers are beyond the tolerance, when a ledger
or gate does not pass, and when it exceeds its time limit; its finished results are kept. Each part
is a process of its own, so that one that hangs, crashes or fills the device does not affect the
others. The file is written again after each. A rehearsal's figures mean nothing.
At the end the figures are printed as tables (table.py). Exit: 0 when no part failed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import table
from benchmarks.gpu.plan import (
    NOT_ASKED_FOR,
    PARTS,
    ROOT,
    SECONDS,
    Part,
    limit,
    look,
    obstacle,
    with_earlier,
)
from optimizer.harness.runtimes.machine import describe_machine

WORKER = ("-m", "benchmarks.gpu.parts")


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    here = look(describe_machine())
    gpu = here.machine.gpu
    name = gpu.name.lower().replace(" ", "-") if gpu else "none"
    out = args.out or ROOT / "benchmarks" / "results" / f"gpu-{name}.json"
    if gpu is None and args.out is None:
        print("no GPU was found; give --out FILE to write down that nothing ran", file=sys.stderr)
        return 1
    start = time.monotonic()
    document: dict[str, Any] = {
        "suite": 2,
        "rehearsal": args.rehearse,
        "machine": here.machine.to_json(),
        "parts": {p.name: {"status": "not run", "why": "the suite was stopped"} for p in PARTS},
    }
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as work:
        for part in PARTS:
            left = args.seconds - (time.monotonic() - start)
            why = obstacle(part, document["parts"], here, left, args)
            made = {"status": "not run", "why": why}
            if not why:
                made = run(job(part, Path(work), args), limit(part, here, left, args))
            document["parts"][part.name] = made
            document["seconds"] = round(time.monotonic() - start, 1)
            _write(out, document)
            if why == NOT_ASKED_FOR:
                continue
            last = (made.get("why") or f"{made.get('seconds')} s").splitlines()[-1]
            print(f"{part.name:<40} {made['status']}: {last}", file=sys.stderr, flush=True)
    found = Counter(part["status"] for part in document["parts"].values())
    told = ", ".join(f"{found[status]} {status}" for status in ("ran", "failed", "not run"))
    print(told, file=sys.stderr)
    if args.rehearse:
        print("A rehearsal: these figures mean nothing.\n")
    print(table.tables(document["parts"]))
    return exit_code(document)


def exit_code(document: Mapping[str, Any]) -> int:
    """Return 1 if a part failed. A part that did not run has not failed: it says why."""
    return int(any(p["status"] == "failed" for p in document["parts"].values()))


def job(part: Part, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Make the job of a part, without its time limit."""
    return {
        "part": part.name,
        "work": str(work),
        "answer": str(work / f"answer-{part.name.replace(':', '.')}.json"),
        "rehearse": args.rehearse,
        "source": args.source.get(part.source),
    }


def run(job: Mapping[str, Any], seconds: float, worker: Sequence[str] = WORKER) -> dict[str, Any]:
    """Run a part in its own process and return its entry of the document."""
    start, answer = time.monotonic(), Path(job["answer"])
    log, late = answer.with_suffix(".log"), False
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, *worker, json.dumps({**job, "seconds": max(seconds - 4, 1)})],
            cwd=ROOT,
            env={**os.environ, **_settings(job["rehearse"])},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            late = True
    told = json.loads(answer.read_text(encoding="utf-8")) if answer.is_file() else {}
    if told.get("status") == "not run":
        return {"status": "not run", "why": told["why"]}
    entry = {"status": told.get("status", "running"), "seconds": round(time.monotonic() - start, 1)}
    why = told.get("why", "")
    if late:
        why = f"time: it did not end within {seconds:.0f} s"
    elif entry["status"] == "running" or process.returncode:
        tail = log.read_text(errors="replace").strip()[-1500:]
        why = tail or f"exit {process.returncode}"
    if why:
        entry |= {"status": "failed", "why": why}
    return entry | ({"result": told["result"]} if told.get("result") else {})


def _settings(rehearse: bool) -> dict[str, str]:
    """Make the environment of a part; a rehearsal has one thread, as it shares the cores."""
    threads = {"OMP_NUM_THREADS": "1"} if rehearse else {}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", **threads}


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="these parts, and those they read"
    )
    parser.add_argument("--source", action="append", default=[], metavar="RECIPE=FOLDER")
    args = parser.parse_args(given)
    unknown = set(args.only) - {p.name for p in PARTS}
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    args.only = with_earlier(args.only)
    args.source = dict(s.partition("=")[::2] for s in args.source)
    unknown = set(args.source) - {p.source for p in PARTS}
    if unknown:
        parser.error(f"no part takes the source of {', '.join(sorted(unknown))}")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
