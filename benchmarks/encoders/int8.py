"""INT8 sentence encoders on a CPU: ours and every other way to run the model, in one run.

    python -m benchmarks.encoders.int8 --with-openvino

Latency is a ratio to ONNX Runtime float, measured in rounds: in each, every system runs a few
times, one after another, in an order that rotates; the ratio is taken within the round and the
table shows its median over the rounds with a distribution-free 95 % interval. Every system is a
process of its own, pinned to the same cores, and stopped while another is timed. Quality is on
the recipe's evaluation texts: cosine to the embeddings of ONNX Runtime float, and the accuracy
of a probe fit on float embeddings of other texts. A system that cannot run is a row with the
reason. Writes results/encoder_int8.md and .json.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.encoders import int8_peers
from benchmarks.encoders.int8_table import markdown
from benchmarks.measure.models import export_float, lower_model
from benchmarks.measure.processes import (
    REFERENCE,
    System,
    Worker,
    openvino_python,
    openvino_versions,
)
from benchmarks.measure.results import RESULTS, ROOT, conditions, write
from benchmarks.measure.turns import (
    BATCHES,
    ITERATIONS,
    attempt,
    summarize,
    time_in_turns,
    warm,
)
from benchmarks.measure.worker import write_batches
from optimizer.data import datasets
from optimizer.foundation.progress import say
from optimizer.harness.contract import Contract, read
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.tasks import encode
from optimizer.recipe.file import read as read_recipe
from optimizer.recipe.schema import Recipe
from optimizer.store import Store
from optimizer.validate.quality import quality

SEQUENCE = 128  # tokens of a timed text

Samples = Sequence[datasets.Sample]


@dataclass(frozen=True)
class Inputs:
    """Inputs of every system; the last four are array files of measure/worker.py."""

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
    source, lowered = lower_model(recipe, store, asked.model)
    python, why = None, "not run: --with-openvino was not given"
    if asked.openvino_python or asked.with_openvino:
        python = asked.openvino_python or openvino_python(asked.openvino)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        graph = export_float(source.path, scratch)
        inputs = prepare(recipe, source.path, scratch, asked.examples)
        say("quantizing with the peers' own tools")
        int8_peers.quantize(graph, inputs.calibration, scratch, python)
        chosen = int8_peers.systems(
            lowered, graph, source.path / "checkpoint", scratch, python, why
        )
        result = run(chosen, inputs, asked, scratch)
    write(result, markdown(result), asked.out, asked.name)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "minilm-int8.yaml")
    p.add_argument("--model", type=Path, help="an INT8 ONNX file or a bundle instead of a run")
    p.add_argument("--store", type=Path, default=ROOT / "artifacts" / "store")
    p.add_argument("--out", type=Path, default=RESULTS)
    p.add_argument("--with-openvino", action="store_true", help="install it in --openvino")
    p.add_argument("--openvino", type=Path, default=ROOT / ".venv-openvino")
    p.add_argument("--openvino-python", type=Path, help="an interpreter that has it already")
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--rounds", type=int, default=12)
    p.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: processor time, on a machine that others use; of one thread, as others spin",
    )
    p.add_argument("--name", default="encoder_int8", help="name of the files in --out")
    p.add_argument("--examples", type=int, help="evaluation texts; all when absent")
    p.add_argument("--only", nargs="+", help="names of systems; the reference is always there")
    return p.parse_args()


def prepare(recipe: Recipe, source: Path, scratch: Path, examples: int | None) -> Inputs:
    """Tokenize every text once, with the harness, for all systems alike."""
    contract = read(source / "contract.json")
    tokenizer = load_tokenizer(source / "checkpoint", contract)
    calibrate, validate = recipe.calibrate, recipe.validate_
    assert calibrate is not None
    assert validate.train is not None
    assert validate.latency.data is not None
    seen = datasets.read_samples(calibrate.data, calibrate.samples, calibrate.seed)
    rows = datasets.read_samples(validate.data, examples)
    train_rows = datasets.read_samples(validate.train)
    timed = [s.text for s in datasets.read_samples(validate.latency.data)]

    def put(name: str, batches: Iterable[Mapping[str, Any]]) -> Path:
        return write_batches(dict(enumerate(batches)), scratch / f"{name}.npz")

    def batches(samples: Samples, size: int, length: int) -> Iterable[Mapping[str, Any]]:
        return datasets.encode_batches(samples, contract, tokenizer, size, length)

    longest = contract.text.max_length
    timing = {b: encode(contract, tokenizer, timed[:b], size=SEQUENCE) for b in BATCHES}
    check_full(contract, timing)
    return Inputs(
        source / "contract.json",
        rows,
        train_rows,
        put("calibration", batches(seen, 1, calibrate.sequence_length)),
        write_batches(timing, scratch / "timing.npz"),
        put("evaluation", batches(rows, validate.batch_size, longest)),
        put("train", batches(train_rows, validate.batch_size, longest)),
    )


def check_full(contract: Contract, timing: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise ValueError where a timed text is padded, which would shorten its time."""
    if not all(t["attention_mask"].all() for t in timing.values()):
        raise ValueError(f"the timing texts have fewer than {SEQUENCE} tokens ({contract.task})")


def run(
    chosen: Sequence[System], inputs: Inputs, asked: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    """Measure all systems; return the result for JSON."""
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
                    workers[s.name] = Worker(s, threads, int8_peers.WORKER, **told)
                    stack.callback(workers[s.name].close)
                    attempt(rows, s.name, partial(warm, workers[s.name]))
            if i == 0:
                judge(wanted, workers, rows, inputs, scratch)
            for batch in BATCHES:
                times = time_in_turns(workers, rows, batch, asked)
                for name, found in summarize(times).items():
                    cell = f"{threads} thread{'s' * (threads > 1)}, batch {batch}"
                    rows[name]["latency"][cell] = found
    return {
        **conditions(load_before, asked.rounds, asked.clock),
        "openvino": openvino_versions(wanted),
        "reference": REFERENCE,
        "sequence": SEQUENCE,
        "iterations": ITERATIONS,
        "examples": len(inputs.rows),
        "systems": rows,
    }


def judge(
    wanted: Sequence[System],
    workers: Mapping[str, Worker],
    rows: dict[str, Any],
    inputs: Inputs,
    scratch: Path,
) -> None:
    """Add to each row its quality, compared with the reference's embeddings."""

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
        cosines = quality.compute_cosines(base.text, answers.text)
        _, section = quality.judge("probe_accuracy", metric, len(inputs.rows), 0.02, 0.95, cosines)
        rows[s.name]["quality"] = {k: section[k] for k in ("candidate", "difference", "cosine")}
    for s in wanted:
        if s.answers_of and s.answers_of in rows:
            rows[s.name]["quality_as"] = s.answers_of


if __name__ == "__main__":
    main()
