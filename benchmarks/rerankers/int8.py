"""An INT8 cross-encoder on a CPU: ours, and sentence-transformers' own exports, in one run.

    python calibration/train_jargon_reranker.py
    optimize recipes/jargon-reranker-int8.yaml
    python -m benchmarks.rerankers.int8 --bundle artifacts/jargon-reranker-int8/1

Every system scores texts: a query with one passage, and with eight. Times are ratios to
CrossEncoder on ONNX Runtime in float within the same round (measure/turns.py); rankings are judged
by nDCG@10 and its paired difference from CrossEncoder in torch on the same queries. The library's
systems run in an environment of their own (--library): its exports need optimum, which needs an
older transformers. Writes results/reranker.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure.processes import OURS, REFERENCE, System, Worker, environment_python
from benchmarks.measure.results import (
    CLOCKS,
    RESULTS,
    ROOT,
    conditions,
    table,
    with_interval,
    write,
)
from benchmarks.measure.turns import BATCHES, attempt, summarize, time_in_turns, warm
from optimizer.validate.quality.metrics import Ranking
from optimizer.validate.quality.significance import decide_by_mean

WORKER = "benchmarks.rerankers.int8_worker"
LIBRARY = (
    "sentence-transformers==5.7.0",
    "optimum-onnx[onnxruntime]==0.1.0",
    "optimum-intel[openvino]==1.27.0",
    "nncf==3.4.0",
    "datasets<5",
)
MARGIN, CONFIDENCE = 0.01, 0.95  # of nDCG, as in the recipe
TORCH = "torch-eager"

HEADING = """\
# INT8 cross-encoder on a CPU

Made by `python -m benchmarks.rerankers.int8`. {of} from texts to scores, relative to
CrossEncoder on ONNX Runtime in float: median over {rounds} rounds, [95 % interval]; lower is
faster. nDCG@10 of {queries} queries with ten passages each; the change is against CrossEncoder in
torch, query by query, with the lower and upper confidence bounds, each one-sided at 95 %.
"""


def main() -> None:
    asked = arguments()
    pairs = [json.loads(line) for line in (asked.model / "pairs-evaluate.jsonl").open()]
    python = asked.library_python or environment_python(
        asked.library,
        LIBRARY,
        "sentence_transformers, optimum.onnxruntime, optimum.intel, nncf, datasets",
    )
    with tempfile.TemporaryDirectory() as name:
        quantize(asked.model, Path(name), python)
        result = run(systems(asked, Path(name), python), pairs, asked, Path(name))
    write(result, markdown(result), asked.out, "reranker")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--model", type=Path, default=ROOT / "artifacts" / "jargon-reranker")
    p.add_argument("--bundle", type=Path, required=True)
    p.add_argument("--library", type=Path, default=ROOT / ".venv-library", help="made if missing")
    p.add_argument("--library-python", type=Path, help="an interpreter that has the packages")
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--rounds", type=int, default=20)
    p.add_argument("--clock", choices=list(CLOCKS), default="wall")
    p.add_argument("--out", type=Path, default=RESULTS)
    return p.parse_args()


def quantize(model: Path, scratch: Path, python: Path) -> None:
    """Write the exports of sentence-transformers below `scratch`, with its default settings. It
    calibrates on single texts: here query and passage side by side."""
    rows = [json.loads(line) for line in (model / "pairs-calibrate.jsonl").open()]
    (scratch / "calibrate").mkdir()
    texts = (json.dumps({"text": f"{r['query']} {r['passage']}"}) + "\n" for r in rows)
    (scratch / "calibrate" / "train.jsonl").write_text("".join(texts), encoding="utf-8")
    request = json.dumps({"kind": "quantize", "model": str(model), "out": str(scratch)})
    subprocess.run([python, "-m", WORKER, request], check=True, cwd=ROOT)


def systems(asked: argparse.Namespace, scratch: Path, python: Path) -> list[System]:
    def library(name: str, title: str, backend: str, file: str | None = None) -> System:
        folder = scratch / backend if backend != "torch" else asked.model
        return System(name, title, "library", folder, {"backend": backend, "file": file}, python)

    def bundle(name: str, title: str, runtime: str) -> System:
        return System(name, title, "bundle", asked.bundle, {"runtime": runtime})

    dynamic, static = "onnx/model_qint8_avx512_vnni.onnx", "openvino/openvino_model_qint8.xml"
    return [
        bundle(OURS, "**this on ONNX Runtime, INT8**", "onnxruntime"),
        bundle("ours-openvino", "**this on OpenVINO, INT8**", "openvino"),
        library(REFERENCE, "CrossEncoder, ONNX Runtime, float", "onnx"),
        library(TORCH, "CrossEncoder, torch, float", "torch"),
        library("openvino-float", "CrossEncoder, OpenVINO, float", "openvino"),
        library("ort-dynamic", "`export_dynamic_quantized_onnx_model`", "onnx", dynamic),
        library("openvino-static", "`export_static_quantized_openvino_model`", "openvino", static),
    ]


def run(
    chosen: list[System], pairs: list[dict[str, Any]], asked: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    """Measure all systems; return the result for JSON."""
    rows: dict[str, Any] = {s.name: {"title": s.title, "why": "", "latency": {}} for s in chosen}
    load_before = os.getloadavg()[0]
    scores: dict[str, Any] = {}
    for i, threads in enumerate(asked.threads):
        with ExitStack() as stack:
            workers = {}
            for s in chosen:
                more = {"pairs": str(asked.model / "pairs-time.jsonl")}
                workers[s.name] = Worker(s, threads, WORKER, **more)
                stack.callback(workers[s.name].close)
                attempt(rows, s.name, partial(warm, workers[s.name]))
            for s in chosen if i == 0 else ():
                request = {"score": str(asked.model / "pairs-evaluate.jsonl")}
                out = str(scratch / f"{s.name}.npy")
                ask = partial(workers[s.name].ask, **request, out=out)
                if not rows[s.name]["why"] and attempt(rows, s.name, ask):
                    scores[s.name] = np.load(out)
            for batch in BATCHES:
                times = time_in_turns(workers, rows, batch, asked)
                for name, figures in summarize(times).items():
                    cell = f"{threads} thread{'s' * (threads > 1)}, {batch} pair{'s' * (batch > 1)}"
                    rows[name]["latency"][cell] = figures
    judge(rows, scores, pairs)
    queries = len({p["query"] for p in pairs})
    return {
        **conditions(load_before, asked.rounds, asked.clock),
        "queries": queries,
        "systems": rows,
    }


def judge(rows: dict[str, Any], scores: dict[str, Any], pairs: list[dict[str, Any]]) -> None:
    """Add nDCG@10 of each system, and its paired drop from torch."""
    numbers = {q: i for i, q in enumerate(dict.fromkeys(p["query"] for p in pairs))}
    ranking = Ranking(
        "ndcg",
        np.arange(len(pairs)),
        np.array([numbers[p["query"]] for p in pairs]),
        np.array([float(p["relevance"]) for p in pairs]),
    )
    values = {n: ranking.values(ranking.weights(s.astype(np.float64))) for n, s in scores.items()}
    for name, value in values.items():
        decision = decide_by_mean(values[TORCH] - value, MARGIN, CONFIDENCE)
        rows[name]["ndcg"] = float(value.mean())
        rows[name]["drop"] = {"value": decision.drop, "interval": list(decision.interval)}


def markdown(result: dict[str, Any]) -> str:
    cells = list(dict.fromkeys(c for s in result["systems"].values() for c in s["latency"]))
    lines = [
        [
            s["title"],
            *(with_interval(s["latency"][c]["ratio"]) if c in s["latency"] else "–" for c in cells),
            f"{s['ndcg']:.4f}" if "ndcg" in s else s["why"] or "–",
            _change(s["drop"]) if "drop" in s else "–",
        ]
        for s in result["systems"].values()
    ]
    machine = result["machine"]
    where = (
        f"{machine['cpu']}, {', '.join(machine['flags'])}; load average {result['load_average']}"
    )
    heading = HEADING.format(**result, of=CLOCKS[result["clock"]])
    body = table(["system", *cells, "nDCG@10", "change"], lines)
    return "\n".join([heading, body, "", f"{result['when']}, {where}.", ""])


def _change(drop: dict[str, Any]) -> str:
    value, low, high = (0.0 - x for x in (drop["value"], *reversed(drop["interval"])))
    return f"{value:+.4f} ({low:+.4f} to {high:+.4f})"


if __name__ == "__main__":
    main()
