"""Everything there is to know about this project on one GPU, in one command and eight minutes.

    python benchmarks/gpu_suite.py                       writes benchmarks/results/gpu-<name>.json
    python benchmarks/gpu_suite.py --source minilm-int8=FOLDER    a checkpoint that is not installed
    python benchmarks/gpu_suite.py --rehearse            tiny models, and what runs without a GPU

Needs no network, and none of tensorrt, tensorrt_rtx, onnxruntime-gpu and torch: a part whose
package is missing says so. Every part of PARTS is in the JSON, in this order:

    {"suite": 1, "rehearsal": bool, "machine": {...}, "seconds": n,
     "parts": {name: {"status": "ran", "seconds": n, "result": {...}}
                   | {"status": "failed", "seconds": n, "why": the end of what it said}
                   | {"status": "not run", "why": what is missing: GPU, package, file or time}}}

Each part is a process of its own with a limit, so that one that hangs, crashes or fills the device
takes nothing from the others. The file is renewed after each. A rehearsal's figures mean nothing.
Exit: 0 when no part failed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 470  # of eight minutes; the rest is for starting and writing
OURS = ("torch", "transformers", "onnx", "onnxscript", "tokenizers", "onnxruntime", "datasets")
TRT = "cuda.bindings"
SLOWER = 6  # a rehearsal may take longer: it has no deadline to keep


@dataclass(frozen=True)
class Part:
    """needs: modules. after: parts it takes files from. least, most: seconds it is worth starting
    with, and may take. gpu: not even a rehearsal goes without."""

    name: str
    least: int
    most: int
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    gpu: bool = False
    recipe: str = ""


def speed(kind: str, system: str, most: int, *needs: str, gpu: bool = False) -> Part:
    return Part(f"{kind}:{system}", 10, most, needs, (f"prepare:{kind}",), gpu)


def proof(recipe: str, runtime: str, least: int, *needs: str) -> Part:
    return Part(f"ledger:{recipe}:{runtime}", least, 200, (*OURS, *needs), gpu=True, recipe=recipe)


PARTS = (
    Part("validity", 5, 40, ("tensorrt_rtx",), gpu=True),
    Part("bandwidth", 5, 30, ("torch",), gpu=True),
    Part("prepare:encoder", 20, 100, OURS),
    Part("build:encoder:tensorrt-rtx", 10, 60, ("tensorrt_rtx",), ("prepare:encoder",)),
    Part("build:encoder:tensorrt", 10, 90, ("tensorrt",), ("prepare:encoder",), gpu=True),
    speed("encoder", "torch-eager", 30, "torch", "transformers"),
    speed("encoder", "onnxruntime", 40, "onnxruntime"),
    speed("encoder", "tensorrt-rtx", 40, "tensorrt_rtx", TRT, gpu=True),
    speed("encoder", "tensorrt", 60, "tensorrt", TRT, gpu=True),
    proof("minilm-int8", "tensorrt-rtx", 60, "tensorrt_rtx", TRT),
    proof("minilm-int8", "tensorrt", 60, "tensorrt", TRT),
    proof("minilm-int8", "onnxruntime", 60),
    speed("encoder", "torch-compile", 75, "torch", "transformers", gpu=True),
    Part("prepare:decoder", 40, 150, OURS),
    Part("build:decoder:tensorrt-rtx", 20, 60, ("tensorrt_rtx",), ("prepare:decoder",)),
    Part("build:decoder:tensorrt", 20, 90, ("tensorrt",), ("prepare:decoder",), gpu=True),
    speed("decoder", "torch-eager", 30, "torch", "transformers"),
    speed("decoder", "onnxruntime", 40, "onnxruntime"),
    speed("decoder", "tensorrt-rtx", 40, "tensorrt_rtx", TRT, gpu=True),
    speed("decoder", "tensorrt", 40, "tensorrt", TRT, gpu=True),
    *(
        proof(recipe, runtime, 400, *needs)
        for recipe in ("smollm2-int4", "smollm2-int8", "llama-3.2-1b-int4", "qwen3-4b-int4")
        for runtime, needs in (
            ("tensorrt-rtx", ("tensorrt_rtx", TRT)),
            ("tensorrt", ("tensorrt", TRT)),
            ("onnxruntime", ()),
        )
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    sys.path.insert(0, str(ROOT))
    from optimizer.harness.machine import this_machine

    machine = this_machine()
    name = machine.gpu.name.lower().replace(" ", "-") if machine.gpu else "none"
    out = args.out or ROOT / "benchmarks" / "results" / f"gpu-{name}.json"
    if machine.gpu is None and args.out is None:
        print("no GPU was found; give --out FILE to write down that nothing ran", file=sys.stderr)
        return 1
    start = time.monotonic()
    document: dict[str, Any] = {
        "suite": 1,
        "rehearsal": args.rehearse,
        "machine": machine.to_json(),
        "parts": {p.name: {"status": "not run", "why": "the suite was stopped"} for p in PARTS},
    }
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as work:
        for part in PARTS:
            left = args.seconds - (time.monotonic() - start)
            why = obstacle(part, document["parts"], machine.gpu is not None, left, args)
            made = {"status": "not run", "why": why} if why else _run(part, Path(work), left, args)
            document["parts"][part.name] = made
            document["seconds"] = round(time.monotonic() - start, 1)
            _write(out, document)
            last = (made.get("why") or f"{made.get('seconds')} s").splitlines()[-1]
            print(f"{part.name:<40} {made['status']}: {last}", file=sys.stderr, flush=True)
    return int(any(p["status"] == "failed" for p in document["parts"].values()))


def obstacle(
    part: Part, done: dict[str, Any], gpu: bool, left: float, args: argparse.Namespace
) -> str:
    """Why a part is not run, or ""."""
    if args.only and part.name not in args.only:
        return "it was not asked for (--only)"
    if not gpu and (part.gpu or not args.rehearse):
        return "no GPU was found"
    missing = [m for m in part.needs if not _present(m)]
    if missing:
        return f"package: {', '.join(missing)} cannot be imported here"
    if part.recipe and (absent := _source(part.recipe, args.source)):
        return f"package: {absent}"
    idle = [name for name in part.after if done[name]["status"] != "ran"]
    if idle:
        return f"it takes its files from {', '.join(idle)}, which did not run"
    if left < part.least:
        return f"time: it takes {part.least} s or more, {max(left, 0):.0f} are left"
    return ""


def _present(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # the package around it is missing
        return False


def _source(recipe: str, given: dict[str, str]) -> str:
    """Why a recipe's checkpoint is not here, or ""."""
    import yaml

    if recipe in given:
        return "" if Path(given[recipe]).is_dir() else f"{given[recipe]} is no folder"
    path = ROOT / "recipes" / f"{recipe}.yaml"
    source = str(yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["source"])
    kind, _, package = source.partition("python-package:")
    if kind:
        return f"{source} is on a hub, and there is no network; give --source {recipe}=FOLDER"
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{package}, which brings the weights, is not installed; or give --source"
    return ""


def _run(part: Part, work: Path, left: float, args: argparse.Namespace) -> dict[str, Any]:
    """One part in its own process."""
    most = part.most * (SLOWER if args.rehearse else 1)
    limit, start = min(most, left), time.monotonic()
    answer = work / f"{part.name.replace(':', '.')}.json"
    job = {
        "part": part.name,
        "work": str(work),
        "answer": str(answer),
        "seconds": limit - 3,
        "rehearse": args.rehearse,
        "source": args.source.get(part.recipe, args.source.get("minilm-int8")),
    }
    log = answer.with_suffix(".log")
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "gpu_parts.py"), json.dumps(job)],
            cwd=ROOT,
            env={**os.environ, **_settings(args.rehearse)},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return {"status": "not run", "why": f"time: it did not end within {limit:.0f} s"}
    spent = round(time.monotonic() - start, 1)
    if code != 0 or not answer.is_file():
        tail = log.read_text(errors="replace").strip()[-1500:]
        return {"status": "failed", "seconds": spent, "why": tail or f"exit {code}"}
    result = json.loads(answer.read_text(encoding="utf-8"))
    if "not_run" in result:
        return {"status": "not run", "why": result["not_run"]}
    return {"status": "ran", "seconds": spent, "result": result}


def _settings(rehearse: bool) -> dict[str, str]:
    """Of a part's process. A rehearsal shares its cores with whatever else runs: one thread."""
    threads = {"OMP_NUM_THREADS": "1"} if rehearse else {}
    return {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **threads}


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
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="these parts alone")
    parser.add_argument("--source", action="append", default=[], metavar="RECIPE=FOLDER")
    args = parser.parse_args(given)
    unknown = set(args.only) - {p.name for p in PARTS}
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    args.source = dict(s.split("=", 1) for s in args.source)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
