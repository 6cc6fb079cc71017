"""Memory, disk and time of load and compress on ONNX files beside what `optimize plan` predicts.

    python -m benchmarks.onnx.plan FILE.onnx=SIZE ... --layers 6 --method rtn --method gptq

SIZE is that of open axes; --layers adds a transformer of 512 features, of that number of layers.
Rows are drawn. Each file and method is a process of its own, in which the check of the file, load
and compress run one after the other on one thread. Memory is the highest anonymous memory (RssAnon,
20 ms apart) of the check and the stage, because `run` checks first; seconds are processor time, and
what plan adds for imports is left out. Writes results/onnx_plan.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measure import memory
from benchmarks.measure.results import RESULTS, conditions, table, write
from benchmarks.onnx import files, torch_files
from optimizer.compress import estimate as compress_estimate
from optimizer.compress import stage as compress
from optimizer.load.onnx_model import stage as load
from optimizer.load.stage import IMPORTS
from optimizer.recipe.schema import Recipe
from optimizer.store import Estimate


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("file", nargs="*", help="PATH or PATH=SIZE")
    p.add_argument("--layers", type=int, nargs="*", default=[])
    p.add_argument("--method", action="append", help="default: rtn")
    p.add_argument("--samples", type=int, default=files.CALIBRATED, help="calibration rows")
    p.add_argument("--one", help=argparse.SUPPRESS)
    p.add_argument("--out", type=Path, default=RESULTS)
    return p.parse_args()


def write_layers(count: int, folder: Path) -> Path:
    """Export a transformer of `count` layers."""
    file = folder / f"transformer-{count}.onnx"
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
    network = nn.TransformerEncoder(layer, count, enable_nested_tensor=False)
    for parameter in network.parameters():  # layers are copies of one
        nn.init.normal_(parameter, 1.0 if parameter.ndim < 2 else 0.0, 0.02)
    torch_files.export(network.eval(), {"src": torch.randn(2, 64, 512)}, file, 17)
    return file


def measure(file: Path, size: int, method: str, samples: int) -> dict[str, Any]:
    """{stage: measured and predicted needs} of one file and method, in this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        document = files.recipe(file.stem, file.resolve(), folder, samples, size)
        document["quantize"] |= {"method": method}
        for part in (document["calibrate"], document["validate"]):
            part["data"]["files"] = [str(folder / f) for f in part["data"]["files"]]
        recipe = Recipe.model_validate_json(json.dumps(document))
        checked = watch(lambda: load.check(recipe.model, folder))[0]
        shapes = load.shapes(recipe.model)
        checked = max(checked, watch(lambda: load.shapes(recipe.model))[0])
        expected = {
            "load": load.estimate(shapes, IMPORTS),
            "compress": compress.estimate_of(recipe.compression, shapes),
        }
        runs: dict[str, Callable[[], object]] = {
            "load": lambda: load.run(recipe.model, folder / "load"),
            "compress": lambda: compress.run(
                recipe.compression, folder / "load", folder / "compress"
            ),
        }
        used, written = {}, {}
        for stage, run in runs.items():
            (folder / stage).mkdir()
            used[stage] = watch(run)
            files_of = (folder / stage).rglob("*")
            written[stage] = sum(f.stat().st_size for f in files_of if f.is_file())
    starts = {"load": load.START, "compress": compress_estimate.START}
    return {
        stage: {
            "memory": max(checked, peak),
            "seconds": seconds,
            "disk": written[stage],
            "predicted": _as_dict(expected[stage], starts[stage]),
        }
        for stage, (peak, seconds) in used.items()
    }


def _as_dict(expected: Estimate, start: float) -> dict[str, float]:
    seconds = expected.seconds - start
    return {"memory": expected.memory, "disk": expected.disk, "seconds": seconds}


def watch(run: Callable[[], object]) -> tuple[int, float]:
    """(highest RssAnon in bytes, seconds of processor time) of a call."""
    peak, done = 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(memory.INTERVAL):
            peak = max(peak, memory.status(os.getpid())["RssAnon"])

    looking = threading.Thread(target=look)
    looking.start()
    start = time.process_time()
    run()
    seconds = time.process_time() - start
    done.set()
    looking.join()
    return peak, seconds


def page(result: Mapping[str, Any]) -> str:
    """The page of results."""
    cells = [
        [
            f"{name}, {row['bytes'] / 1e6:.0f} MB",
            stage,
            f"{used['memory'] / 1e6:,.0f} / {used['predicted']['memory'] / 1e6:,.0f}",
            f"{used['disk'] / 1e6:,.1f} / {used['predicted']['disk'] / 1e6:,.1f}",
            f"{used['seconds']:,.1f} / {used['predicted']['seconds']:,.1f}",
        ]
        for name, row in result["cells"].items()
        for stage, used in row["stages"].items()
    ]
    about = result["conditions"]
    heads = ["file and method", "stage", "memory, MB", "disk, MB", "seconds"]
    return f"""# Needs of ONNX files, measured and predicted

`python -m benchmarks.onnx.plan`: measured / predicted, on one thread, with {result["samples"]}
rows. Disk is what the finished step has; a stage needs up to
twice that while it runs, which is what is predicted of compress.

{table(heads, cells)}

{about["machine"]["cpu"]}; load average {about["load_average"]} before and after; {about["when"]}.
"""


def main() -> None:
    asked, before = arguments(), os.getloadavg()[0]
    if asked.one:
        file, size, method = json.loads(asked.one)
        print(json.dumps(measure(Path(file), size, method, asked.samples)))
        return
    sized = [name.partition("=") for name in asked.file]
    given = {Path(name): int(size or files.USUAL) for name, _, size in sized}
    cells = {}
    with tempfile.TemporaryDirectory() as folder:
        given |= {write_layers(count, Path(folder)): files.USUAL for count in asked.layers}
        for file, size in given.items():
            for method in asked.method or ["rtn"]:
                one = json.dumps([str(file), size, method])
                words = [sys.executable, "-m", "benchmarks.onnx.plan", "--one", one]
                words += ["--samples", str(asked.samples)]
                stages = json.loads(subprocess.run(words, check=True, stdout=-1).stdout)
                cells[f"{file.stem}, {method}"] = {"bytes": file.stat().st_size, "stages": stages}
                print(file.stem, method, stages, file=sys.stderr, flush=True)
    result = {"cells": cells, "samples": asked.samples}
    result["conditions"] = conditions(before, 1, "cpu")
    write(result, page(result), asked.out, "onnx_plan")


if __name__ == "__main__":
    main()
