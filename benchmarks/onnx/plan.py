"""Memory, disk and time of each stage on ONNX files beside what `optimize plan` predicted.

    python -m benchmarks.onnx.plan FILE.onnx=SIZE ... --layers 6 --method rtn --method gptq

SIZE is that of open axes; --layers adds a transformer of 512 features, of that number of layers.
Rows are drawn. Each stage is a process of its own, as in decoders/scale.py, which says how memory
is counted. Finished stages are kept in --work. Writes results/onnx_plan.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.decoders.scale import JUDGED, STAGES, written
from benchmarks.measure import memory
from benchmarks.measure.results import RESULTS, conditions, table, write
from benchmarks.onnx import files, torch_files


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("file", nargs="*", help="PATH or PATH=SIZE")
    p.add_argument("--layers", type=int, nargs="*", default=[])
    p.add_argument("--work", type=Path, default=Path("artifacts/onnx_plan"))
    p.add_argument("--method", action="append", help="default: rtn")
    p.add_argument("--samples", type=int, default=files.CALIBRATED, help="calibration rows")
    p.add_argument("--out", type=Path, default=RESULTS)
    return p.parse_args()


def write_layers(count: int, folder: Path) -> Path:
    """Export a transformer of `count` layers."""
    file = folder / f"transformer-{count}.onnx"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
        network = nn.TransformerEncoder(layer, count, enable_nested_tensor=False)
        torch_files.export(network.eval(), {"src": torch.randn(2, 64, 512)}, file, 17)
    return file


def measure(file: Path, size: int, method: str, samples: int, folder: Path) -> dict[str, Any]:
    """{stage: measured and predicted needs} of one file and method."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "measured.json"
    if kept.is_file():
        return json.loads(kept.read_text())  # type: ignore[no-any-return]
    document = files.recipe(file.stem, file.resolve(), folder, samples, size)
    document["quantize"] |= {"method": method}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(document, indent=1))

    def optimize(command: str, *words: str) -> memory.Used:
        program = [sys.executable, "-m", "optimizer", "--json", command, str(path)]
        log = folder / f"{words[-1] if words else command}.log"
        used = memory.run([*program, "--store", str(folder / "store"), *words], log)
        if used.exit_code not in JUDGED:
            sys.exit(f"{file} {words}: exit {used.exit_code}\n{log.read_text()[-2000:]}")
        return used

    planned = optimize("plan")
    steps = {s["stage"]: s for s in json.loads(planned.output) if s["what"] == "run"}
    stages: dict[str, Any] = {}
    for stage in (s for s in STAGES if s in steps):
        words = ("--artifacts", str(folder / "artifacts"), "--ignore-estimate", "--until", stage)
        used = optimize("run", *words)
        ran = [s for s in json.loads(used.output)["steps"] if s["stage"] == stage]
        stages[stage] = used.as_dict() | {
            "stage_seconds": sum(s["seconds"] for s in ran),
            "disk": sum(written(Path(s["path"])) for s in ran),
            "predicted": {k: steps[stage][k] for k in ("memory", "disk", "seconds")},
        }
        print(file.stem, method, stage, stages[stage], file=sys.stderr, flush=True)
    result = {"bytes": file.stat().st_size, "plan_seconds": planned.seconds, "stages": stages}
    kept.write_text(json.dumps(result, indent=1))
    return result


def page(result: Mapping[str, Any]) -> str:
    """The page of results."""
    cells = []
    for name, row in result["cells"].items():
        for stage, used in row["stages"].items():
            expected = used["predicted"]
            cells.append(
                [
                    f"{name}, {row['bytes'] / 1e6:.0f} MB",
                    stage,
                    f"{used['anonymous'] / 1e6:,.0f} / {expected['memory'] / 1e6:,.0f}",
                    f"{used['disk'] / 1e6:,.1f} / {expected['disk'] / 1e6:,.1f}",
                    f"{used['stage_seconds']:,.1f} / {expected['seconds']:,.1f}",
                ]
            )
    about = result["conditions"]
    heads = ["file and method", "stage", "memory, MB", "disk, MB", "seconds"]
    return f"""# What plan predicts of ONNX files

`python -m benchmarks.onnx.plan`: measured / predicted, of each stage in a process of its own.
Memory is the highest sum of anonymous memory, disk that of the finished step (a stage may need more
while it runs, which is what is predicted). {result["samples"]} calibration rows.

{table(heads, cells)}

{about["machine"]["cpu"]}; load average {about["load_average"]} before and after; {about["when"]}.
"""


def main() -> None:
    asked, load = arguments(), os.getloadavg()[0]
    sized = [name.partition("=") for name in asked.file]
    given = {Path(name): int(size or files.USUAL) for name, _, size in sized}
    given |= {write_layers(count, asked.work): files.USUAL for count in asked.layers}
    cells = {
        f"{file.stem}, {method}": measure(
            file, size, method, asked.samples, asked.work / f"{file.stem}-{method}"
        )
        for file, size in given.items()
        for method in asked.method or ["rtn"]
    }
    result = {"cells": cells, "samples": asked.samples}
    result["conditions"] = conditions(load, 1, "wall")
    write(result, page(result), asked.out, "onnx_plan")


if __name__ == "__main__":
    main()
