"""`optimize search` and Olive's search on INT8 MiniLM: the two models that they find.

    python -m benchmarks.search.beside_olive --olive-python PYTHON [--results benchmarks/results]

PYTHON is that of an environment with olive-ai, onnxruntime, torch (CPU), torchmetrics and optuna.
Both searches get the same checkpoint, calibration texts, rows of the search, text to time, margin
and minutes, one after the other; Olive's options are in peers/olive_search.py. It starts from the
float graph with the probe on the embeddings as its head, since it judges classes. It calibrates on
the same texts joined to 128 tokens, because ONNX Runtime's calibration needs texts of one length.
The found models are judged on the rows that neither search used, and the processor time of one
thread is measured in turns, by encoders/int8.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.encoders import int8
from benchmarks.encoders.int8_peers import NO_SKIP, WORKER
from benchmarks.measure import results
from benchmarks.measure.models import export_float
from benchmarks.measure.processes import OURS, REFERENCE, System, Worker
from benchmarks.measure.results import ROOT
from benchmarks.measure.worker import write_batches
from optimizer import pipeline
from optimizer.data import datasets
from optimizer.foundation.progress import say
from optimizer.harness import tasks
from optimizer.harness.contract import read
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.load.stage import STAGE as LOAD
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Recipe
from optimizer.search import search
from optimizer.search.stages.split import Part, select_rows
from optimizer.store import Store
from optimizer.validate.quality.quality import Probe

RECIPE = ROOT / "recipes" / "minilm-int8.yaml"
CALIBRATED = 128  # tokens of each text that Olive calibrates on
SEARCHED = (
    "quant_mode", "precision", "op_types_to_quantize", "per_channel", "reduce_range",
    "quant_preprocess", "calibrate_method", "quant_format",
)  # fmt: skip
HEAD = """
head (float[B, S, H] last_hidden_state, int64[B, S] attention_mask) =>
     (float[B, C] logits, float[B, H] embedding) {
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    kept = Cast <to = 1> (attention_mask)
    mask = Unsqueeze (kept, two)
    masked = Mul (last_hidden_state, mask)
    total = ReduceSum <keepdims = 0> (masked, one)
    count = ReduceSum <keepdims = 0> (mask, one)
    mean = Div (total, count)
    embedding = LpNormalization <axis = 1, p = 2> (mean)
    logits = Gemm (embedding, probe_weight, probe_bias)
}
"""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--olive-python", type=Path, required=True)
    p.add_argument("--minutes", type=float, default=15, help="time of each search")
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--work", type=Path, default=Path("artifacts/beside_olive"), help="files, store")
    p.add_argument("--results", type=Path, help="folder for search_peers.json and .md")
    options = p.parse_args()
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    changes = ["targets=[{runtime: onnxruntime, device: cpu, threads: 1}]", "search={}"]
    changes += ["validate.min_cosine=null", "validate.latency.batch=[1]"]  # Olive has neither
    changes.append(f"search.budget.hours={options.minutes / 60}")
    recipe, store = recipe_file.read(RECIPE, changes), work / "store"
    source = Store(store).step(LOAD, recipe.model).path
    graph = work / "float" / "model.onnx"
    if not graph.exists():
        graph.parent.mkdir(exist_ok=True)
        export_float(source, graph.parent)
    inputs = prepare(recipe, source, graph, work)
    olive = search_olive(options.olive_python, work, options.minutes, recipe)
    ours = search.run(recipe, store)
    systems = [
        System(REFERENCE, "float", "onnxruntime", graph),
        System("recipe", "the recipe, without a search", OURS, build(recipe, store)),
    ]
    if ours.chosen:
        systems.append(System(OURS, "found by `optimize search`", OURS, build(ours.chosen, store)))
    if olive["chosen"]:
        model, output = Path(olive["chosen"]), {"output": "embedding"}
        settings, title = output | NO_SKIP, "found by Olive, with our session settings"
        systems += [
            System("olive", "found by Olive", "onnxruntime", model, output),
            System("olive-tuned", title, "onnxruntime", model, settings, answers_of="olive"),
        ]
    asked = argparse.Namespace(only=None, threads=[1], rounds=options.rounds, clock="cpu")
    document = int8.run(systems, inputs, asked, work) | {
        "minutes": options.minutes,
        "margin": recipe.validate_.max_drop,
        "searches": {
            "`optimize search`": {
                "found": ours.winner.label if ours.winner else None,
                "models": len(ours.trials),
                "within": sum(t.outcome == "kept" for t in ours.trials),
                "seconds": ours.seconds,
            },
            f"Olive {olive['version']}": {
                "found": write_options(olive["options"]),
                **{name: olive[name] for name in ("metrics", "models", "within", "seconds")},
            },
        },
    }
    if options.results:
        results.write(document, show(document), options.results, "search_peers")
    else:
        print(show(document))


def prepare(recipe: Recipe, source: Path, graph: Path, work: Path) -> int8.Inputs:
    """Write the inputs of Olive's search; return those of the comparison, on the held-out rows.

    source: folder of load
    graph: float ONNX model, to whose embeddings the probe is fitted
    """
    inputs = int8.prepare(recipe, source, work, None)
    contract = read(inputs.contract)
    tokenizer = load_tokenizer(source / "checkpoint", contract)
    assert recipe.calibrate is not None
    seen = datasets.read_samples(
        recipe.calibrate.data, recipe.calibrate.samples, recipe.calibrate.seed
    )
    parts: tuple[Part, Part] = ("search", "held_out")
    known, held_out = (select_rows(p, inputs.rows, tasks.look_up(contract)) for p in parts)
    folder = work / "olive"
    folder.mkdir(exist_ok=True)

    def put(name: str, batches: Iterable[Mapping[str, Any]]) -> Path:
        return write_batches(dict(enumerate(batches)), folder / f"{name}.npz")

    def join() -> Iterator[Mapping[str, Any]]:
        """Yield texts joined to at least CALIBRATED tokens, and cut to them."""
        text = ""
        for one in seen:
            text = f"{text} {one.text}"
            if len(tokenizer.ids([text])[0]) >= CALIBRATED:
                yield tasks.encode(contract, tokenizer, [text], size=CALIBRATED)
                text = ""

    put("calibration", join())
    with np.load(inputs.timing) as timing:  # the batch of one text
        put("timing", [{n[2:]: timing[n] for n in timing.files if n.startswith("1.")}])
    encoded = (tasks.encode(contract, tokenizer, [row.text]) for row in known)
    labels = (np.array([row.label], np.int64) for row in known)
    put("evaluation", ({**b, "label": n} for b, n in zip(encoded, labels, strict=True)))
    longest, size = contract.text.max_length, recipe.validate_.batch_size
    judged = put("held_out", datasets.encode_batches(held_out, contract, tokenizer, size, longest))
    files = {"contract": str(inputs.contract), "inputs": str(inputs.timing)}
    worker = Worker(System(REFERENCE, "", "onnxruntime", graph), 2, WORKER, **files)
    worker.ask(embed=str(inputs.train), out=str(folder / "train.npy"))
    worker.close()
    labelled = np.array([row.label for row in inputs.train_rows])
    probe = Probe.fit(np.load(folder / "train.npy"), labelled)
    onnx.save(add_head(onnx.load(graph), probe), folder / "model.onnx")
    return replace(inputs, rows=held_out, evaluation=judged)


def add_head(model: onnx.ModelProto, probe: Probe) -> onnx.ModelProto:
    """Give a model of hidden states the outputs `embedding` and `logits`, the scores of a probe.

    Olive joins the outputs of all rows, so that none may depend on the length of a row.
    """
    head, graph = onnx.parser.parse_graph(HEAD), model.graph
    head.node[-1].name = "probe"
    del graph.output[:]
    graph.node.extend(head.node)
    graph.output.extend(head.output)
    values = {"probe_weight": probe.weight, "probe_bias": probe.bias - probe.mean @ probe.weight}
    for name, value in values.items():
        graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    return model


def search_olive(python: Path, work: Path, minutes: float, recipe: Recipe) -> dict[str, Any]:
    """Run Olive's search, or read the result of an earlier run in `work`."""
    folder = work / "olive"
    if not (folder / "olive.json").exists():
        say(f"Olive searches for {minutes:g} minutes; its log is {folder / 'olive.log'}")
        module = [python, "-m", "benchmarks.search.peers.olive_search"]
        words = [*module, folder, round(60 * minutes), recipe.validate_.max_drop]
        # torch only reads answers; its threads would take the cores from ONNX Runtime's
        more = {"OLIVE_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
        with (folder / "olive.log").open("w") as log:
            command, env = [str(w) for w in words], {**os.environ, **more}
            subprocess.run(command, check=True, stdout=log, stderr=log, cwd=ROOT, env=env)
    code = "from importlib.metadata import version as v; print(v('olive-ai'))"
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads((folder / "olive.json").read_text())
    return document | {"version": version.stdout.strip()}


def build(recipe: Recipe, store: Path) -> Path:
    """Build the ONNX model of a recipe's only target."""
    steps = Store(store, until="build")
    pipeline.run(recipe.model_copy(update={"search": None}), steps)
    (folder,) = (Path(s["path"]) for s in steps.log if s["stage"] == "lower")
    return folder / "model.onnx"


def write_options(options: Mapping[str, Any] | None) -> str:
    """Write the options that Olive chose; of dynamic quantization some stand for no value."""
    chosen = {n: (options or {}).get(n) for n in SEARCHED}
    return ", ".join(f"{n} {v}" for n, v in chosen.items() if v and not isinstance(v, dict))


def show(document: Mapping[str, Any]) -> str:
    """Page with the figures."""
    searches = [
        [name, str(s["models"]), str(s["within"]), f"{s['seconds']:.0f} s", s["found"] or "none"]
        for name, s in document["searches"].items()
    ]
    heads = ["search", "models judged", "kept the margin", "wall time", "found"]
    heads_of_systems = ["", "drop", "1 text, ms", "/ float", "8 texts, ms", "/ float"]
    rows = []
    for row in document["systems"].values():
        if row["why"]:
            rows.append([row["title"], row["why"], *[""] * 4])
            continue
        drop = row.get("quality", {}).get("difference")
        cells = [f"{-drop['value']:.4f} (at most {-drop['interval'][0]:.4f})"] if drop else [""]
        for cell in row["latency"].values():
            cells += [f"{cell['ms']['p50']:.1f}", results.with_interval(cell["ratio"])]
        rows.append([row["title"], *cells])
    machine, examples = document["machine"], document["examples"]
    return f"""# MiniLM in INT8: the models found by `optimize search` and by Olive

Made by `python -m benchmarks.search.beside_olive`. Each search had {document["minutes"]:g} minutes,
a margin of {document["margin"]:g} of probe accuracy, the same calibration texts, and the same rows.

{results.table(heads, searches)}

On {examples} held-out rows; processor time of one thread, in turns, at 128 tokens:

{results.table(heads_of_systems, rows)}

{document["when"]}, {machine["cpu"]}, {", ".join(machine["flags"])}; load average
{document["load_average"]}.
"""


if __name__ == "__main__":
    main()
