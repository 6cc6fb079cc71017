"""INT8 sentence encoders on a CPU: ours beside every other way to run the model, in one run.

    python -m benchmarks.encoders.encoder_int8 --with-openvino

Latency is a ratio to ONNX Runtime float, measured in rounds: in each, every system runs a few
times, one after another, in an order that rotates; the ratio is taken within the round and the
table shows its median over the rounds with a distribution-free 95 % interval. Every system is a
process of its own, pinned to the same cores, and stopped while another is timed. Quality is on
the recipe's evaluation texts: cosine to the embeddings of ONNX Runtime float, and the accuracy
of a probe fit on float embeddings of other texts. What could not be run is a row that says why.
Writes results/encoder_int8.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import peers
from benchmarks.measure.encoder_table import markdown
from benchmarks.measure.peers import REFERENCE, Lowered, System, Worker
from optimizer.data import datasets
from optimizer.foundation.progress import say
from optimizer.harness.bundle.bench import percentile, percentile_interval
from optimizer.harness.contract import Contract, read
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.runtimes.machine import this_machine
from optimizer.harness.tasks import encode
from optimizer.recipe.file import read as read_recipe
from optimizer.recipe.schema import (
    Compression,
    OpenVinoTarget,
    Recipe,
    TargetSection,
)
from optimizer.store import Step, Store
from optimizer.validate.quality import quality

HERE = Path(__file__).resolve().parents[1]

OPENVINO = ("openvino==2026.4.1", "nncf==3.4.0", "numpy")
SEQUENCE, BATCHES = 128, (1, 8)
ITERATIONS = {1: 16, 8: 4}  # per system and round
WARMUP = {1: 3, 8: 1}  # after it was stopped: its memory has left the caches

Samples = Sequence[datasets.Sample]


@dataclass(frozen=True)
class Inputs:
    """What every system is given. The last four are array files of worker.py's format."""

    contract: Path
    rows: Samples
    train_rows: Samples
    calibration: Path
    timing: Path
    evaluation: Path
    train: Path


def main() -> None:
    asked = arguments()
    recipe, store = read_recipe(asked.recipe), Store(asked.store)
    source, lowered = lowered_model(recipe, store, asked.model)
    python, why = None, "not run: --with-openvino was not given"
    if asked.openvino_python or asked.with_openvino:
        python = asked.openvino_python or peers.openvino_python(asked.openvino, OPENVINO)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        graph = float_graph(source.path, scratch)
        inputs = prepare(recipe, source.path, scratch, asked.examples)
        say("quantizing with the peers' own tools")
        peers.quantize(graph, inputs.calibration, scratch, python)
        chosen = peers.systems(lowered, graph, source.path / "checkpoint", scratch, python, why)
        result = run(chosen, inputs, asked, scratch)
    write(result, markdown(result), asked.out, asked.name)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--recipe", type=Path, default=HERE.parent / "recipes" / "minilm-int8.yaml")
    p.add_argument("--model", type=Path, help="an INT8 ONNX file or a bundle instead of a run")
    p.add_argument("--store", type=Path, default=HERE.parent / "artifacts" / "store")
    p.add_argument("--out", type=Path, default=HERE / "results")
    p.add_argument("--with-openvino", action="store_true", help="install it in --openvino")
    p.add_argument("--openvino", type=Path, default=HERE.parent / ".venv-openvino")
    p.add_argument("--openvino-python", type=Path, help="an interpreter that has it already")
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--rounds", type=int, default=12)
    p.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: processor time, on a machine that others use; of one thread, as others spin",
    )
    p.add_argument("--name", default="encoder_int8", help="of the files in --out")
    p.add_argument("--examples", type=int, help="evaluation texts; all when absent")
    p.add_argument("--only", nargs="+", help="names of systems; the reference is always there")
    return p.parse_args()


def lowered_model(recipe: Recipe, store: Store, model: Path | None) -> tuple[Step, Lowered]:
    """The load step, and the INT8 files: made by the pipeline's own stages. model: the one for ONNX
    Runtime instead."""
    from optimizer.compress.stage import STAGE as compress
    from optimizer.export.stage import STAGE as export
    from optimizer.load.stage import STAGE as load
    from optimizer.lower.stage import STAGE as lower

    source = store.step(load, recipe.model)
    target = next(t for t in recipe.targets if t.runtime == "onnxruntime")
    openvino = OpenVinoTarget(runtime="openvino")

    def made(section: Compression, *targets: TargetSection) -> list[Path]:
        state = store.step(compress, section, source)
        graph = store.step(export, target.export, source, state)
        steps = [store.step(lower, t, source, state, graph) for t in targets]
        return [step.path / "model.onnx" for step in steps]

    ours, other = made(recipe.compression, target, openvino)
    (attention,) = made(with_attention(recipe.compression), openvino)
    if model is not None:
        ours = sorted(model.rglob("model.onnx"))[0] if model.is_dir() else model
    return source, Lowered(ours, other, attention)


def with_attention(section: Compression) -> Compression:
    """The same compression, and integers in attention."""
    assert section.quantize.activations is not None
    activations = section.quantize.activations.model_copy(update={"attention": "int8"})
    quantize = section.quantize.model_copy(update={"activations": activations})
    return section.model_copy(update={"quantize": quantize})


def float_graph(source: Path, folder: Path) -> Path:
    """The float ONNX graph of the untouched checkpoint. (The pipeline's own carries what
    compression folded into the float weights, which is no model a peer should start from.)"""
    from optimizer.export.stage import run as export
    from optimizer.foundation import state
    from optimizer.recipe.schema import Export

    nothing = folder / "nothing"
    nothing.mkdir()
    state.write(state.CompressedState(weights={}), nothing)
    export(Export(), source, nothing, out=folder)
    return folder / "model.onnx"


def prepare(recipe: Recipe, source: Path, scratch: Path, examples: int | None) -> Inputs:
    """Tokenize every text once, with the harness, for all systems alike."""
    contract = read(source / "contract.json")
    tokenizer = load_tokenizer(source / "checkpoint", contract)
    calibrate, validate = recipe.calibrate, recipe.validate_
    assert calibrate is not None
    assert validate.train is not None
    assert validate.latency.data is not None
    seen = datasets.samples(calibrate.data, calibrate.samples, calibrate.seed)
    rows = datasets.samples(validate.data, examples)
    train_rows = datasets.samples(validate.train)
    timed = [s.text for s in datasets.samples(validate.latency.data)]

    def put(name: str, batches: Iterable[Mapping[str, Any]]) -> Path:
        return peers.write_batches(dict(enumerate(batches)), scratch / f"{name}.npz")

    def batches(samples: Samples, size: int, length: int) -> Iterable[Mapping[str, Any]]:
        return datasets.batches(samples, contract, tokenizer, size, length)

    longest = contract.text.max_length
    timing = {b: encode(contract, tokenizer, timed[:b], size=SEQUENCE) for b in BATCHES}
    check_full(contract, timing)
    return Inputs(
        source / "contract.json",
        rows,
        train_rows,
        put("calibration", batches(seen, 1, calibrate.sequence_length)),
        peers.write_batches(timing, scratch / "timing.npz"),
        put("evaluation", batches(rows, validate.batch_size, longest)),
        put("train", batches(train_rows, validate.batch_size, longest)),
    )


def check_full(contract: Contract, timing: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise ValueError when a timed text is padded: it would be easier than it looks."""
    if not all(t["attention_mask"].all() for t in timing.values()):
        raise ValueError(f"the timing texts have fewer than {SEQUENCE} tokens ({contract.task})")


def run(
    chosen: Sequence[System], inputs: Inputs, asked: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    """The whole result as JSON-able data."""
    wanted = [s for s in chosen if not asked.only or s.name in (*asked.only, REFERENCE)]
    rows: dict[str, Any] = {
        s.name: {
            "title": s.title,
            "why": s.why if s.model is None else "",
            "latency": {},
            "reference": s.name == REFERENCE,
        }
        for s in wanted
    }
    load_before = os.getloadavg()[0]
    for i, threads in enumerate(asked.threads):
        with ExitStack() as stack:
            workers = {}
            for s in wanted:
                if s.model is not None and not rows[s.name]["why"]:
                    told = {"contract": str(inputs.contract), "inputs": str(inputs.timing)}
                    workers[s.name] = Worker(s, threads, **told)
                    stack.callback(workers[s.name].close)
                    attempt(rows, s.name, partial(warm, workers[s.name]))
            if i == 0:
                judge(wanted, workers, rows, inputs, scratch)
            for batch in BATCHES:
                times = timed(workers, rows, batch, asked)
                for name, found in summarized(times).items():
                    cell = f"{threads} thread{'s' * (threads > 1)}, batch {batch}"
                    rows[name]["latency"][cell] = found
    machine = this_machine().to_json()
    return {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {k: v for k, v in machine.items() if k != "runners"} | {"flags": cpu_flags()},
        "openvino": versions(wanted),
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "reference": REFERENCE,
        "sequence": SEQUENCE,
        "rounds": asked.rounds,
        "clock": asked.clock,
        "iterations": ITERATIONS,
        "examples": len(inputs.rows),
        "systems": rows,
    }


def attempt(rows: dict[str, Any], name: str, what: Callable[[], Any]) -> Any:
    """Run it; a peer that fails becomes a row that says so, ours and the reference stop the run."""
    say(f"  {name}")
    try:
        return what()
    except RuntimeError as e:
        if name in ("ours", REFERENCE):
            raise
        rows[name]["why"] = f"failed: {' '.join(str(e).split())[-200:]}"
        say(rows[name]["why"])
        return None


def warm(worker: Worker) -> None:
    """First answers of every shape, which may compile."""
    for batch in BATCHES:
        worker.ask(run=1, warmup=2, batch=batch)


def timed(
    workers: Mapping[str, Worker], rows: dict[str, Any], batch: int, asked: argparse.Namespace
) -> dict[str, list[list[float]]]:
    """{system: [milliseconds of each call, per round]}, the order rotating from round to round."""
    times: dict[str, list[list[float]]] = {n: [] for n in workers if not rows[n]["why"]}
    names = list(times)
    request = {"run": ITERATIONS[batch], "warmup": WARMUP[batch], "clock": asked.clock}
    for r in range(asked.rounds):
        say(f"batch {batch}: round {r + 1} of {asked.rounds}")
        start = r % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(workers[name].ask(**request, batch=batch)["ms"])
    return times


def summarized(
    times: Mapping[str, list[list[float]]], reference: str = REFERENCE
) -> dict[str, dict[str, Any]]:
    """Median milliseconds, and the ratio to the reference taken round by round."""
    medians = {n: [percentile(r, 50) for r in rounds] for n, rounds in times.items()}
    made = {}
    for name, mine in medians.items():
        ratios = [a / b for a, b in zip(mine, medians[reference], strict=True)]
        every = [t for r in times[name] for t in r]
        made[name] = {
            "ms": {"p50": percentile(every, 50), "p99": percentile(every, 99), "min": min(every)},
            "ratio": {
                "median": percentile(ratios, 50),
                "interval": list(percentile_interval(ratios, 50)),
                "rounds": ratios,
            },
        }
    return made


def judge(
    wanted: Sequence[System],
    workers: Mapping[str, Worker],
    rows: dict[str, Any],
    inputs: Inputs,
    scratch: Path,
) -> None:
    """Fill in each row's quality beside the reference's embeddings."""

    def embeddings(worker: Worker, batches: Path) -> Any:
        out = scratch / f"{worker.name}.npy"
        worker.ask(embed=str(batches), out=str(out))
        return np.load(out)

    reference = workers[REFERENCE]
    train = quality.Answers(tuple(embeddings(reference, inputs.train)))
    base = quality.Answers(tuple(embeddings(reference, inputs.evaluation)))
    for s in wanted:
        if s.name not in workers or s.answers_of or rows[s.name]["why"]:
            continue
        found = attempt(rows, s.name, partial(embeddings, workers[s.name], inputs.evaluation))
        if found is None:
            continue
        answers = quality.Answers(tuple(found))
        metric = quality.compare(
            "probe_accuracy", inputs.rows, base, answers, (inputs.train_rows, train)
        )
        cosines = quality.cosines_of(base.text, answers.text)
        _, section = quality.judge("probe_accuracy", metric, len(inputs.rows), 0.02, 0.95, cosines)
        rows[s.name]["quality"] = {k: section[k] for k in ("candidate", "difference", "cosine")}
    for s in wanted:
        if s.answers_of and s.answers_of in rows:
            rows[s.name]["quality_as"] = s.answers_of


def versions(wanted: Sequence[System]) -> dict[str, str]:
    """Of OpenVINO and NNCF, asked of their own environment."""
    own = Path(sys.executable)
    of = (s.python for s in wanted if s.kind == "openvino" and s.model and s.python != own)
    python = next(of, None)
    if python is None:
        return {}
    code = "from importlib.metadata import version as v; print(v('openvino'), v('nncf'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(("openvino", "nncf"), found.stdout.split(), strict=True))


def cpu_flags() -> list[str]:
    """The vector extensions that decide INT8 speed."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    present = set(next((x for x in text.splitlines() if x.startswith("flags")), "").split())
    return sorted(present & {"avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "amx_bf16"})


def write(result: dict[str, Any], page: str, folder: Path, name: str) -> None:
    """The figures and the page that shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
