"""INT4 decoding on a CPU: ours, every peer and float in one run.

    python -m benchmarks.decoders.llm_decode --model LOWERED --float GRAPH --checkpoint HF_FOLDER \\
        --openvino LOWERED --our-gguf FILE --gguf FILE --llama LIBRARY --peers-python PYTHON

Milliseconds per token at batch 1 after a prompt of 128 tokens, and prefill of prompts of 128 and
512. Systems take turns in rounds, in an order that rotates, each in a process of its own, pinned
to the same cores, stopped while another is timed, and started three times in a run. Every round has
another random prompt. Ratios are taken within the round.

Peers start from the same checkpoint and keep their own defaults for INT4; the table has the bytes
of weights that a token reads, since they differ. dNLL: nats per token above float, paired over
windows of 512 tokens that calibration did not see (those of gguf_quality.py), computed by the
runtime that is timed. A system that cannot run is a row with the reason. Finished thread counts are
kept in --work and not measured again; --fresh starts over. Writes results/llm_decode.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.decoders.llm_table import markdown
from benchmarks.measure.processes import System, Worker
from benchmarks.measure.results import RESULTS, ROOT, conditions, write
from optimizer.foundation.progress import say
from optimizer.harness.bundle.bench import percentile, percentile_interval

SCRIPT = "benchmarks.decoders.llm_worker"
OURS, FLOAT = "ours", "float"
PROMPTS, TOKENS, WARMUP = (128, 512), 24, 4  # tokens after the first prompt; WARMUP are dropped
LAUNCHES = 3  # the place of a process's memory changes its speed by several per cent
PACKAGES = ("onnxruntime", "onnxruntime-genai", "openvino", "openvino-genai", "nncf")
LLAMA = "llama.cpp v0.5.0 (npm @node-llama-cpp/linux-x64 3.22.1)"


def main() -> None:
    asked = arguments()
    asked.work.mkdir(parents=True, exist_ok=True)
    chosen = [s for s in systems(asked) if not asked.only or s.name in asked.only]
    load_before = os.getloadavg()[0]
    result: dict[str, Any] = {
        "packages": versions(asked.peers_python),
        "systems": {s.name: described(s) for s in chosen},
        "windows": asked.windows,
        "quality": quality(asked, chosen),
        "cells": {},
    }
    for threads in asked.threads:
        result["cells"][str(threads)] = finished(asked, chosen, threads)
    result = conditions(load_before, asked.rounds, asked.clock) | result
    write(result, markdown(result), asked.out, "llm_decode")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--model", type=Path, required=True, help="folder of our lowered INT4 model")
    p.add_argument("--small-head", type=Path, help="the same with its head in INT4 as well")
    p.add_argument("--openvino", type=Path, help="folder of ours lowered for OpenVINO")
    p.add_argument("--our-gguf", type=Path, help="ours as GGUF: recipes/smollm2-int4-gguf.yaml")
    p.add_argument("--float", type=Path, required=True, help="folder of the float ONNX graph")
    p.add_argument("--checkpoint", type=Path, required=True, help="what load made, for peers")
    p.add_argument("--gguf", type=Path, help="the model as GGUF, for llama.cpp and OpenVINO")
    p.add_argument(
        "--llama", type=Path, help="folder of libllama (benchmarks/decoders/llama_library.py)"
    )
    p.add_argument("--peers-python", type=Path, help="an interpreter that has the peers")
    p.add_argument("--work", type=Path, default=ROOT / "artifacts" / "llm_decode")
    p.add_argument("--out", type=Path, default=RESULTS)
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--rounds", type=int, default=12)
    p.add_argument("--windows", type=int, default=40, help="that dNLL is measured on; 0: none")
    p.add_argument("--only", nargs="+", help="names of systems")
    p.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    p.add_argument("--fresh", action="store_true", help="measure again what --work has")
    return p.parse_args()


def systems(asked: argparse.Namespace) -> list[System]:
    """List ours, float, and the peers, whose missing models are made in --work."""
    python = asked.peers_python or Path(sys.executable)
    genai, genai_why = made(asked, "genai", "build", asked.checkpoint)
    given = [str(asked.llama)]
    q4, q4_why = made(
        asked, "q4_0.gguf", "requantize", asked.gguf and asked.llama and asked.gguf, given
    )
    nncf, nncf_why = made(asked, "nncf", "nncf", f"{asked.float}:{asked.checkpoint}")
    own = asked.model if (asked.model / "genai_config.json").is_file() else None
    own_why = "the bundle has no genai_config.json" if own is None else genai_why
    peer: dict[str, Any] = {"python": python}
    llama = {"options": {"library": str(asked.llama)}}
    small = asked.small_head / "model.onnx" if asked.small_head else None
    served = asked.openvino / "model.onnx" if asked.openvino else None
    paged = {
        "options": {
            "dynamic_quantization": 64,
            "contract": str(asked.checkpoint.parent / "contract.json"),
        }
    }
    ours_in_llama = asked.our_gguf if asked.llama else None
    return [
        System(OURS, "**ours, INT4**", "ort", asked.model / "model.onnx"),
        System("ours-head4", "**ours, head INT4 too**", "ort", small, why="no --small-head"),
        System(
            "ours-openvino", "**ours, in OpenVINO**", "harness", served,
            why="no --openvino", **paged,
        ),
        System(
            "ours-gguf", "**ours, GGUF Q4_0 in llama.cpp**", "llama", ours_in_llama,
            why="no --our-gguf or no --llama", **llama,
        ),
        System(FLOAT, "ONNX Runtime float", "ort", asked.float / "model.onnx"),
        System("ours-genai", "ours, run by onnxruntime-genai", "genai", own, why=own_why, **peer),
        System("genai", "onnxruntime-genai's own INT4", "genai", genai, why=genai_why, **peer),
        System(
            "openvino-int4", "OpenVINO GenAI, its own INT4", "openvino", nncf,
            why=nncf_why, **peer,
        ),
        System("openvino", "OpenVINO GenAI, Q4_0", "openvino", q4, why=q4_why, **peer),
        System("llama.cpp", "llama.cpp, Q4_0", "llama", q4, why=q4_why, **llama),
    ]  # fmt: skip


def made(
    asked: argparse.Namespace, name: str, kind: str, source: Any, given: Sequence[str] = ()
) -> tuple[Any, str]:
    """Make a peer's model in --work; return it, or None with the reason."""
    path = asked.work / name
    if asked.peers_python is None or source is None:
        return None, "not run: --peers-python or its source was not given"
    if path.exists():
        return path, ""
    say(f"making {name}")
    partial = path.with_name("partial-" + name)
    config = {"kind": kind, "model": str(source), "out": str(partial), "given": given}
    command = [asked.peers_python, "-m", SCRIPT, json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None, f"failed: {' '.join(done.stderr.split())[-200:]}"
    partial.rename(path)
    return path, ""


def quality(asked: argparse.Namespace, chosen: Sequence[System]) -> dict[str, list[float]]:
    """Compute {system: nats per token of each window} where the runtime gives logits.

    Results are kept in --work by file.
    """
    from benchmarks.decoders.llm_int4 import windows

    texts = windows(Path("eval.jsonl"), asked.windows, None, asked.checkpoint.parent)
    found: dict[str, list[float]] = {}
    for system in chosen if texts else ():
        if system.model is None:
            continue
        stamp = [str(system.model), system.model.stat().st_mtime, len(texts)]
        kept = asked.work / f"nats-{system.name}.json"
        before = json.loads(kept.read_text()) if kept.is_file() and not asked.fresh else {}
        if before.get("stamp") != stamp:
            say(f"reading {len(texts)} windows: {system.name}")
            before = {"stamp": stamp, "nats": scored(system, texts)}
            kept.write_text(json.dumps(before))
        if before["nats"]:
            found[system.name] = before["nats"]
    return found


def scored(system: System, texts: Sequence[list[int]]) -> list[float]:
    """Compute nats per token of each text; nothing where the runtime gives no logits."""
    worker = Worker(system, 1, SCRIPT)
    try:
        return [worker.ask(score=ids)["nats"] for ids in texts]
    except RuntimeError as e:
        say(f"{system.name}: {str(e).splitlines()[-1]}")
        return []
    finally:
        worker.close()


def described(system: System) -> dict[str, Any]:
    why = system.why if system.model is None else ""
    size = weight_bytes(system.model) if system.model is not None else None
    return {"title": system.title, "why": why, "weight_bytes": size}


def weight_bytes(model: Path) -> int:
    """Count the bytes of weights that one token reads.

    Lookup tables do not count; a GGUF file with tied embeddings, and OpenVINO's own, are read
    entirely.
    """
    if model.suffix == ".gguf":
        return model.stat().st_size
    own = model / "openvino_model.bin"
    if own.is_file():
        return own.stat().st_size
    import onnx_ir as ir

    graph = ir.load(model / "model.onnx" if model.is_dir() else model).graph
    looked_up = ("Gather", "GatherBlockQuantized", "GroupQueryAttention")
    total = 0
    for value in graph.initializers.values():
        users = {n.op_type for n, _ in value.uses()}
        if value.const_value is not None and users - set(looked_up):
            total += value.const_value.nbytes
    return total


def finished(asked: argparse.Namespace, chosen: Sequence[System], threads: int) -> dict[str, Any]:
    """Measure one thread count, or read its figures of the same files from --work."""
    stamps = [(s.name, str(s.model), s.model.stat().st_mtime if s.model else 0) for s in chosen]
    key = json.loads(json.dumps([stamps, asked.rounds, asked.clock]))
    kept = asked.work / f"threads-{threads}.json"
    if kept.is_file() and not asked.fresh:
        found = json.loads(kept.read_text())
        if found["key"] == key:
            say(f"threads {threads}: measured before, from {kept}")
            return dict(found["cells"])
    cells = measured(asked, chosen, threads)
    kept.write_text(json.dumps({"key": key, "cells": cells}))
    return cells


def measured(asked: argparse.Namespace, chosen: Sequence[System], threads: int) -> dict[str, Any]:
    """Measure {"memory": GB/s, "systems": {name: {"decode", "prefill 128", ... or "why"}}}."""
    failed: dict[str, str] = {}
    rounds: dict[str, list[dict[str, float]]] = {}
    rates = []
    for launch in range(LAUNCHES):
        first = launch * asked.rounds // LAUNCHES
        last = (launch + 1) * asked.rounds // LAUNCHES
        with ExitStack() as stack:
            memory = Worker(System("memory", "", "memory", None), threads, SCRIPT)
            rates.append(memory.ask(gigabytes=True))
            memory.close()
            workers = {}
            for s in chosen:
                if s.model is not None and s.name not in failed:
                    workers[s.name] = Worker(s, threads, SCRIPT, clock=asked.clock)
                    stack.callback(workers[s.name].close)
                    attempt(workers[s.name], failed, prompt=PROMPTS[0], tokens=WARMUP, seed=0)
            names = list(workers)
            for r in range(first, last):
                say(f"threads {threads}: round {r + 1} of {asked.rounds}")
                start = r % len(names)
                for name in names[start:] + names[:start]:
                    found = one_round(workers[name], failed, seed=r + 1)
                    if found is not None:
                        rounds.setdefault(name, []).append(found)
    told = {n: summarize(f, rounds) for n, f in rounds.items() if n not in failed}
    best = {kind: round(max(r[kind] for r in rates), 1) for kind in ("read", "copy")}
    return {"memory": best, "systems": told | {n: {"why": w} for n, w in failed.items()}}


def one_round(worker: Worker, failed: dict[str, str], seed: int) -> dict[str, float] | None:
    """Measure {"decode": median ms, "prefill 128": ms, "prefill 512": ms}."""
    if worker.name in failed:
        return None
    short, long = PROMPTS
    first = attempt(worker, failed, prompt=short, tokens=WARMUP + TOKENS, seed=seed)
    second = attempt(worker, failed, prompt=long, tokens=0, seed=seed)
    if first is None or second is None:
        return None
    return {
        "decode": percentile(first["ms"][WARMUP:], 50),
        f"prefill {short}": first["prefill_ms"],
        f"prefill {long}": second["prefill_ms"],
    }


def attempt(worker: Worker, failed: dict[str, str], **asked: Any) -> dict[str, Any] | None:
    """Send a request; a peer that ends is reported and left out, ours and float stop the run."""
    if worker.name in failed:
        return None
    try:
        return worker.ask(**asked)
    except RuntimeError as e:
        if worker.name in (OURS, FLOAT):
            raise
        failed[worker.name] = f"failed: {' '.join(str(e).split())[-200:]}"
        say(failed[worker.name])
        return None


def summarize(
    mine: Sequence[Mapping[str, float]],
    everyone: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, Any]:
    """Compute medians over rounds, and ratios within rounds: float / this, ours / this."""
    told: dict[str, Any] = {}
    for what in mine[0]:
        times = [r[what] for r in mine]
        told[what] = {"median": percentile(times, 50), "interval": interval(times), "all": times}
        for label, other in (("speedup", FLOAT), ("ours", OURS)):
            if other in everyone and len(everyone[other]) == len(mine):
                pairs = zip(everyone[other], mine, strict=True)
                ratios = [a[what] / b[what] for a, b in pairs]
                told[what][label] = {"median": percentile(ratios, 50), "interval": interval(ratios)}
    return told


def interval(values: list[float]) -> list[float | None]:
    return list(percentile_interval(values, 50))


def versions(python: Path | None) -> dict[str, str]:
    """Read package versions: ONNX Runtime's here, the peers' in their environment."""
    code = (
        "import json, sys; from importlib.metadata import distributions as d; "
        "print(json.dumps({x.metadata['Name']: x.version for x in d() "
        "if x.metadata['Name'].lower().replace('_', '-') in sys.argv[1:]}))"
    )
    found: dict[str, str] = {}
    for each in filter(None, (python, Path(sys.executable))):
        out = subprocess.run([each, "-c", code, *PACKAGES], capture_output=True, text=True)
        found |= json.loads(out.stdout or "{}")
    return found


if __name__ == "__main__":
    main()
