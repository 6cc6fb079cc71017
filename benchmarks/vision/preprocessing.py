"""Time image preprocessing, from file bytes to pixels: ours and transformers' image processors.

    python -m benchmarks.vision.preprocessing --with-torchvision  # after the recipe's data scripts

On one thread, in rounds as in benchmarks/encoders/int8.py; the ratio is to transformers'
fast processor (torchvision) after Pillow's decoder, in the same round. torchvision needs an
environment of its own, with the torch that it is built for; --torchvision-python names one. The
recipe's timed images are one set of images, entire photographs (--whole) another.
Writes results/preprocessing.md and .json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure.processes import System, Worker, environment_python
from benchmarks.measure.results import (
    CLOCKS,
    RESULTS,
    ROOT,
    conditions,
    table,
    with_interval,
    write,
)
from benchmarks.measure.turns import BATCHES, summarize, time_in_turns
from optimizer.data import datasets
from optimizer.load.stage import STAGE as load
from optimizer.recipe.file import read as read_recipe
from optimizer.store import Store

WORKER = "benchmarks.vision.preprocessing_worker"
RECIPE = ROOT / "recipes" / "efficientnet-lite0-int8.yaml"
TORCHVISION = ("torch==2.14.1", "torchvision==0.29.1", "transformers==5.23.0", "pillow==13.0.0")
REFERENCE = "fast"
SHOWN = 20  # number of images whose pixels are compared


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--recipe", type=Path, default=RECIPE)
    p.add_argument("--whole", type=Path, nargs="*", default=[], help="parquet files of images")
    p.add_argument("--store", type=Path, default=ROOT / "artifacts" / "store")
    p.add_argument("--out", type=Path, default=RESULTS)
    p.add_argument("--with-torchvision", action="store_true", help="install it in --torchvision")
    p.add_argument("--torchvision", type=Path, default=ROOT / ".venv-torchvision")
    p.add_argument("--torchvision-python", type=Path, help="an interpreter that has it already")
    p.add_argument("--rounds", type=int, default=20)
    p.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    p.add_argument("--name", default="preprocessing", help="of the files in --out")
    return p.parse_args()


def systems(checkpoint: Path, python: Path) -> list[System]:
    """List ours, decoding in ours alone, and transformers' processors."""

    def peer(name: str, title: str, decode: str, backend: str = "torchvision") -> System:
        options = {"decode": decode, "backend": backend}
        return System(name, title, "processor", checkpoint, options, python)

    return [
        System("ours", "**ours**", "ours", checkpoint),
        System("ours-decoding", "ours, decoding alone", "decoding", checkpoint),
        peer(REFERENCE, "transformers' fast processor, Pillow decodes", "pillow"),
        peer(
            "fast-torchvision", "transformers' fast processor, torchvision decodes", "torchvision"
        ),
        peer("pil", "transformers' Pillow processor", "pillow", "pil"),
    ]


def image_sets(asked: argparse.Namespace, scratch: Path) -> dict[str, Path]:
    """Write image files as {title of a set: folder}."""
    data = read_recipe(asked.recipe).validate_.latency.data
    assert data is not None
    sets = {"images that the recipe times": [s.input for s in datasets.read_samples(data)]}
    for file in asked.whole:
        import pyarrow.parquet as parquet

        sets[f"photographs as they are ({file.name})"] = (
            parquet.read_table(file).column("image").to_pylist()
        )
    folders = {}
    for i, (title, images) in enumerate(sets.items()):
        folder = folders[title] = scratch / str(i)
        folder.mkdir()
        for j, image in enumerate(images):
            content = image if isinstance(image, bytes) else Path(image).read_bytes()
            (folder / f"{j:04}").write_bytes(content)
    return folders


def run(
    chosen: Sequence[System], files: Path, contract: Path, asked: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    """Measure one set of images as {system: row}."""
    rows: dict[str, Any] = {s.name: {"title": s.title, "why": "", "time": {}} for s in chosen}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for s in chosen:
            told = {"contract": str(contract), "inputs": str(files)}
            workers[s.name] = Worker(s, 1, WORKER, **told)
            stack.callback(workers[s.name].close)
        shown = {}
        for name in (n for n in workers if n != "ours-decoding"):
            out = scratch / f"{name}.npy"
            workers[name].ask(answer=min(SHOWN, len(list(files.iterdir()))), out=str(out))
            shown[name] = np.load(out)
        for name, pixels in shown.items():
            rows[name]["differs"] = float(np.abs(pixels - shown["ours"]).max())
        for batch in BATCHES:
            times = time_in_turns(workers, rows, batch, asked)
            for name, cell in summarize(times, REFERENCE).items():
                rows[name]["time"][f"batch {batch}"] = cell
    return rows


def markdown(result: Mapping[str, Any]) -> str:
    """Format a table per set of images, then machine and versions."""
    cells = [f"batch {b}" for b in BATCHES]
    parts = []
    for title, rows in result["sets"].items():
        lines = []
        for row in rows.values():
            shown = [row["title"]]
            for cell in (row["time"][c] for c in cells):
                shown += [with_interval(cell["ratio"]), f"{cell['ms']['p50']:.2f}"]
            differs = row.get("differs")
            lines.append([*shown, "" if differs is None else f"{differs:.2g}"])
        heads = ["way", *(h for c in cells for h in (c, "ms")), "differs from ours by"]
        parts.append(f"{title[0].upper()}{title[1:]}:\n\n{table(heads, lines)}\n")
    machine, of = result["machine"], CLOCKS[result["clock"]]
    body = "\n".join(parts)
    return f"""# From the bytes of image files to a model's pixels

`python -m benchmarks.vision.preprocessing`, {result["recipe"]}. {of} on one thread relative to
transformers' fast processor behind Pillow's decoder in the same run, median over {result["rounds"]}
rounds, [95 % interval]; lower is faster. Decoding is included. The last column: the largest
difference of a pixel as the model reads it, over the first images.

{body}
{machine["cpu"]}, {machine["cores"]} cores; load average {result["load_average"]} before and after;
{result["when"]}; {", ".join(TORCHVISION)}.
"""


def main() -> None:
    asked = arguments()
    python = asked.torchvision_python
    if python is None:
        if not asked.with_torchvision:
            sys.exit("Give --with-torchvision, or --torchvision-python.")
        python = environment_python(asked.torchvision, TORCHVISION, "torchvision, transformers")
    source = Store(asked.store).step(load, read_recipe(asked.recipe).model).path
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        chosen = systems(source / "checkpoint", python)
        sets = {
            title: run(chosen, files, source / "contract.json", asked, scratch)
            for title, files in image_sets(asked, scratch).items()
        }
    result = {
        "recipe": asked.recipe.name,
        **conditions(before, asked.rounds, asked.clock),
        "sets": sets,
    }
    write(result, markdown(result), asked.out, asked.name)


if __name__ == "__main__":
    main()
