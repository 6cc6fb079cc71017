"""INT8 image classifiers on a CPU: ours and every other way to run the model, in one run.

    python -m benchmarks.vision.int8 --with-openvino  # after the recipe's data scripts

Time of the forward pass is a ratio to ONNX Runtime float, measured in rounds as in
benchmarks/encoders/int8.py. Agreement is the share of the recipe's evaluation images whose
first answer is that of ONNX Runtime float, with Wilson's 95 % interval; all quantizers calibrate on
the same pixels. A system that cannot run is a row with the reason. Writes results/<name>.md and
.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks.measure.models import Lowered, export_float, lower_model
from benchmarks.measure.processes import (
    REFERENCE,
    System,
    Worker,
    openvino_python,
    openvino_versions,
)
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
from benchmarks.measure.worker import write_batches
from optimizer.compress.data import calibration
from optimizer.data import datasets
from optimizer.foundation.progress import say
from optimizer.harness import tasks
from optimizer.harness.contract import read
from optimizer.harness.inputs.image import ARRAY
from optimizer.harness.tasks import encode
from optimizer.recipe.file import read as read_recipe
from optimizer.recipe.schema import Recipe
from optimizer.store import Store

WORKER = "benchmarks.vision.int8_worker"
RECIPE = ROOT / "recipes" / "efficientnet-lite0-int8.yaml"


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--recipe", type=Path, default=RECIPE)
    p.add_argument("--store", type=Path, default=ROOT / "artifacts" / "store")
    p.add_argument("--out", type=Path, default=RESULTS)
    p.add_argument("--with-openvino", action="store_true", help="install it in --openvino")
    p.add_argument("--openvino", type=Path, default=ROOT / ".venv-openvino")
    p.add_argument("--openvino-python", type=Path, help="an interpreter that has it already")
    p.add_argument("--rounds", type=int, default=12)
    p.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    p.add_argument("--name", default="vision_int8", help="of the files in --out")
    p.add_argument("--examples", type=int, help="evaluation images; all when absent")
    p.add_argument("--only", nargs="+", help="names of systems; the reference is always there")
    return p.parse_args()


def systems(
    ours: Lowered, graph: Path, checkpoint: Path, scratch: Path, python: Path | None
) -> list[System]:
    """List ours first, then the float systems, then the other quantizers."""
    why = "" if python else "not run: --with-openvino was not given"
    own = python or Path(sys.executable)

    def openvino(name: str, title: str, model: Path) -> System:
        return System(name, title, "openvino", model if python else None, python=own, why=why)

    return [
        System("ours", "**ours, INT8, ONNX Runtime**", "onnxruntime", ours.onnxruntime),
        openvino("ours-openvino", "**ours, INT8, OpenVINO**", ours.openvino),
        System(REFERENCE, "ONNX Runtime float", "onnxruntime", graph),
        System("torch-eager", "PyTorch eager", "torch", checkpoint),
        System("torch-compile", "torch.compile, frozen", "torch", checkpoint, {"compile": True}),
        System(
            "ort-static", "ONNX Runtime quantize_static", "onnxruntime", scratch / "static.onnx"
        ),
        openvino("openvino-float", "OpenVINO float", graph),
        openvino("openvino-int8", "OpenVINO + NNCF INT8", scratch / "nncf.xml"),
    ]


def arrays(recipe: Recipe, source: Path, scratch: Path, examples: int | None) -> dict[str, Path]:
    """Write the pixels for calibration, evaluation and timing, made by the harness."""
    contract, validate = read(source / "contract.json"), recipe.validate_
    opened = tasks.look_up(contract).inputs.open(source / "checkpoint", contract)
    assert validate.latency.data is not None
    rows = datasets.read_samples(validate.data, examples)
    size = validate.batch_size
    timed_images = [s.input for s in datasets.read_samples(validate.latency.data)]
    seen = calibration.split_batches(calibration.make_batches(recipe.compression, source))
    parts: dict[str, Mapping[int, Mapping[str, Any]]] = {
        "calibration": {i: {ARRAY: np.asarray(b[ARRAY])} for i, b in enumerate(seen)},
        "evaluation": {
            i: encode(contract, opened, [s.input for s in rows[i : i + size]])
            for i in range(0, len(rows), size)
        },
        "timing": {b: encode(contract, opened, timed_images[:b]) for b in BATCHES},
    }
    return {n: write_batches(b, scratch / f"{n}.npz") for n, b in parts.items()}


def quantize(kind: str, python: Path, graph: Path, data: Path, out: Path) -> None:
    """Make a peer's INT8 model in a process of its environment."""
    say(f"quantizing: {kind}")
    config = {"kind": kind, "model": str(graph), "calibration": str(data), "out": str(out)}
    command: list[str | Path] = [python, "-m", WORKER, json.dumps(config)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def run(
    chosen: Sequence[System], data: Mapping[str, Path], asked: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    """Measure all systems as {system: row}."""
    rows: dict[str, Any] = {s.name: {"title": s.title, "why": s.why, "latency": {}} for s in chosen}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for s in (s for s in chosen if s.model is not None):
            workers[s.name] = Worker(s, 1, WORKER, inputs=str(data["timing"]))
            stack.callback(workers[s.name].close)
            attempt(rows, s.name, partial(warm, workers[s.name]))
        answers = {}
        for name in (n for n in workers if not rows[n]["why"]):
            out = scratch / f"{name}.npy"
            workers[name].ask(answer=str(data["evaluation"]), out=str(out))
            answers[name] = np.load(out).argmax(1)
        for name, labels in answers.items():
            same = int((labels == answers[REFERENCE]).sum())
            interval = wilson(same, len(labels))
            rows[name]["agreement"] = {"share": same / len(labels), "interval": list(interval)}
        for batch in BATCHES:
            for name, cell in summarize(time_in_turns(workers, rows, batch, asked)).items():
                rows[name]["latency"][f"batch {batch}"] = cell
    return rows


def wilson(count: int, of: int) -> tuple[float, float]:
    """Compute the 95 % interval of a share (Wilson 1927)."""
    z, share = NormalDist().inv_cdf(0.975), count / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + (z / (2 * of)) ** 2)
    return middle - half, middle + half


def markdown(result: Mapping[str, Any]) -> str:
    """Format one table, then machine and versions."""
    cells = [f"batch {b}" for b in BATCHES]
    lines = []
    for row in result["systems"].values():
        if row["why"]:
            lines.append([row["title"], row["why"], *["–"] * 2 * len(cells)])
            continue
        share, (low, high) = row["agreement"]["share"], row["agreement"]["interval"]
        shown = [row["title"], f"{100 * share:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"]
        for cell in (row["latency"][c] for c in cells):
            shown += [with_interval(cell["ratio"]), f"{cell['ms']['p50']:.1f}"]
        lines.append(shown)
    heads = ["system", "agreement", *(h for c in cells for h in (c, "ms"))]
    machine = result["machine"]
    of = CLOCKS[result["clock"]]
    recipe, images, rounds = result["recipe"], result["images"], result["rounds"]
    return f"""# INT8 classifiers of images on a CPU

`python -m benchmarks.vision.int8`, {recipe}: {images} images. {of} of the forward pass on
one thread relative to ONNX Runtime float in the same run, median over {rounds} rounds, [95 %
interval]; lower is faster. Agreement: the share of first answers that are the float model's.

{table(heads, lines)}

{machine["cpu"]}, {machine["cores"]} cores, {", ".join(machine["flags"])}; load average
{result["load_average"]} before and after; {result["when"]}; {result["openvino"]}.
"""


def main() -> None:
    asked = arguments()
    recipe, store = read_recipe(asked.recipe), Store(asked.store)
    source, ours = lower_model(recipe, store, None)
    python = asked.openvino_python
    if python is None and asked.with_openvino:
        python = openvino_python(asked.openvino)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        graph = export_float(source.path, scratch)
        data = arrays(recipe, source.path, scratch, asked.examples)
        chosen = systems(ours, graph, source.path / "checkpoint", scratch, python)
        chosen = [s for s in chosen if not asked.only or s.name in (*asked.only, REFERENCE)]
        files = {"ort-static": "static.onnx", "openvino-int8": "nncf.xml"}
        for s in (s for s in chosen if s.name in files and s.model is not None):
            kind = {"openvino-int8": "nncf"}.get(s.name, s.name)
            quantize(kind, s.python, graph, data["calibration"], scratch / files[s.name])
        rows = run(chosen, data, asked, scratch)
        with np.load(data["evaluation"]) as images:
            count = sum(len(images[key]) for key in images.files)
        result = {
            "recipe": asked.recipe.name,
            **conditions(before, asked.rounds, asked.clock),
            "openvino": openvino_versions(chosen),
            "images": count,
            "systems": rows,
        }
    write(result, markdown(result), asked.out, asked.name)


if __name__ == "__main__":
    main()
