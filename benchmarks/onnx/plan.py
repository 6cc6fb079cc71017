"""Memory, disk and time of each stage on ONNX files beside what `optimize plan` predicts.

    python -m benchmarks.onnx.plan FILE.onnx=SIZE ... --layers 6 --memory 512 --method gptq

SIZE is that of open axes; --layers adds a transformer of 512 features, of that number of layers,
with external data, and --memory an LSTM of that width. Rows are drawn. `optimize run --until`
makes one stage after the other, each in a process of its own, and checks the file each time.
Memory is the highest anonymous memory of that process (RssAnon, 20 ms apart); time is processor
time, less that of a run that finds all stages finished. `taskset -c 0` measures one thread. Writes
results/onnx_plan.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from benchmarks.measure import memory
from benchmarks.measure.results import RESULTS, conditions, table, write
from benchmarks.onnx import files, torch_files

STAGES = ("load", "compress", "export", "lower", "build", "validate", "package")
OPTIMIZE = (sys.executable, "-m", "optimizer")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("file", nargs="*", help="PATH or PATH=SIZE")
    p.add_argument("--layers", type=int, nargs="*", default=[])
    p.add_argument("--memory", type=int, nargs="*", default=[], help="widths of an LSTM")
    p.add_argument("--method", action="append", help="default: rtn")
    p.add_argument("--samples", type=int, default=files.CALIBRATED, help="calibration rows")
    p.add_argument("--out", type=Path, default=RESULTS)
    return p.parse_args()


def write_layers(count: int, folder: Path) -> Path:
    """Export a transformer of `count` layers, with external data."""
    file = folder / f"transformer-{count}.onnx"
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
    network = nn.TransformerEncoder(layer, count, enable_nested_tensor=False)
    for parameter in network.parameters():  # layers are copies of one
        nn.init.normal_(parameter, 1.0 if parameter.ndim < 2 else 0.0, 0.02)
    torch_files.export(network.eval(), {"src": torch.randn(2, 64, 512)}, file, 17)
    onnx.save(onnx.load(file), file, save_as_external_data=True, location=f"{file.stem}.data")
    return file


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.memory = nn.Linear(64, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, steps: Tensor) -> Tensor:
        return self.head(self.memory(self.enter(steps).relu())[0][:, -1])  # type: ignore[no-any-return]


def write_recurrent(width: int, folder: Path) -> Path:
    """Export an LSTM between linear layers, for 32 steps of 64 features."""
    file = folder / f"lstm-{width}.onnx"
    torch.manual_seed(0)
    torch_files.export(_Recurrent(width).eval(), {"steps": torch.randn(2, 32, 64)}, file, 17)
    return file


def measure(file: Path, size: int, method: str, samples: int) -> dict[str, Any]:
    """{stage: measured and predicted needs} of one file and method."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        document = files.recipe(file.stem, file.resolve(), folder, samples, size)
        document["quantize"] |= {"method": method}
        recipe, store, log = folder / "recipe.yaml", folder / "store", folder / "log"
        recipe.write_text(json.dumps(document), encoding="utf-8")
        words = [str(recipe), "--store", str(store)]
        plan = memory.run([*OPTIMIZE, "--json", "plan", *words], log)
        predicted = {entry["stage"]: entry for entry in json.loads(plan.output)}
        words += ["--artifacts", str(folder / "artifacts"), "--ignore-estimate", "--until"]
        used = {s: memory.run([*OPTIMIZE, "run", *words, s], log) for s in STAGES}
        finished = memory.run([*OPTIMIZE, "run", *words, STAGES[-1]], log)
        if finished.exit_code:
            raise RuntimeError(log.read_text(encoding="utf-8"))
        written = {
            stage: sum(f.stat().st_size for f in (store / stage).rglob("*") if f.is_file())
            for stage in STAGES
        }
    return {
        stage: {
            "memory": run.anonymous,
            "seconds": max(run.cpu_seconds - finished.cpu_seconds, 0.0),
            "disk": written[stage],
            "predicted": {n: predicted[stage][n] for n in ("memory", "disk", "seconds")},
        }
        for stage, run in used.items()
    }


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

`python -m benchmarks.onnx.plan`: measured / predicted, threads: {result["threads"]}, with
{result["samples"]} rows. Disk is what the finished step has; a stage needs up to
twice that while it runs, which is what is predicted of compress. Seconds measured are processor
time; those predicted are the time of a quiet machine, starts included.

{table(heads, cells)}

{about["machine"]["cpu"]}; load average {about["load_average"]} before and after; {about["when"]}.
"""


def main() -> None:
    asked, before = arguments(), os.getloadavg()[0]
    sized = [name.partition("=") for name in asked.file]
    given = {Path(name): int(size or files.USUAL) for name, _, size in sized}
    cells = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given |= {write_layers(count, folder): files.USUAL for count in asked.layers}
        given |= {write_recurrent(width, folder): files.USUAL for width in asked.memory}
        for file, size in given.items():
            for method in asked.method or ["rtn"]:
                stages = measure(file, size, method, asked.samples)
                whole = sum(f.stat().st_size for f in file.parent.glob(f"{file.stem}.*"))
                cells[f"{file.stem}, {method}"] = {"bytes": whole, "stages": stages}
                print(file.stem, method, stages, file=sys.stderr, flush=True)
    result = {"cells": cells, "samples": asked.samples, "threads": torch.get_num_threads()}
    result["conditions"] = conditions(before, 1, "cpu")
    write(result, page(result), asked.out, "onnx_plan")


if __name__ == "__main__":
    main()
