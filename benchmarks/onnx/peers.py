"""INT8 of ONNX files on a CPU: ours, ONNX Runtime's quantize_static and NNCF.

    python -m benchmarks.onnx.peers --nncf-python PYTHON NAME ...

NAMEs are files that benchmarks.onnx.files quantized in the same --work: their drawn rows calibrate
and judge each system. Kept is the mean cosine of a row's outputs with the float file's, of a file
with one output of classes also the share of rows with the same class. Time is processor time of one
row on one thread, in turns. Writes results/onnx_peers.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
from numpy.typing import NDArray

from benchmarks.measure.results import RESULTS, conditions, table, with_interval, write
from benchmarks.measure.worker import write_batches
from benchmarks.onnx.detector import FLOAT, WORKER, time_in_turns

Rows = Mapping[str, NDArray[Any]]
Run = Callable[[Rows], list[NDArray[Any]]]
PER_CHANNEL = 13
"""First opset whose quantized weights have a scale per channel."""
TITLES = {
    FLOAT: "ONNX Runtime float",
    "ours": "**ours, INT8, ONNX Runtime**",
    "ort-static": "ONNX Runtime quantize_static",
    "nncf": "OpenVINO + NNCF INT8",
}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("name", nargs="+")
    p.add_argument("--work", type=Path, default=Path("artifacts/onnx_files"))
    p.add_argument("--nncf-python", help="an interpreter with nncf and openvino")
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--out", type=Path, default=RESULTS)
    return p.parse_args()


def each(rows: Rows) -> list[dict[str, NDArray[Any]]]:
    """The rows one by one."""
    return [
        {n: a[i : i + 1] for n, a in rows.items()} for i in range(len(next(iter(rows.values()))))
    ]


def ort_static(file: Path, rows: Rows, out: Path) -> Path:
    """Quantize with ONNX Runtime: uint8 activations by minmax, int8 weights per channel."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(each(rows))

        def get_next(self) -> Any:
            return next(self.left, None)

    ready, model = out.with_name("prepared.onnx"), onnx.load(file)
    if max(o.version for o in model.opset_import) < PER_CHANNEL:
        file = out.with_name("converted.onnx")
        onnx.save(onnx.version_converter.convert_version(model, PER_CHANNEL), file)
    quant_pre_process(str(file), str(ready), skip_symbolic_shape=True)
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(str(ready), str(out), Reader(), per_channel=True, **types)
    return out


def open_model(file: Path, outputs: list[str]) -> Run:
    """A function from a row to the outputs, on one thread."""
    if file.suffix == ".xml":
        import openvino as ov

        settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        compiled = ov.Core().compile_model(file, "CPU", settings)
        return lambda row: [np.array(compiled(dict(row))[name]) for name in outputs]
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda row: [np.asarray(a) for a in session.run(outputs, dict(row))]


def kept(found: list[list[NDArray[Any]]], expected: list[list[NDArray[Any]]]) -> dict[str, Any]:
    """{"cosine": mean over rows of the lowest of a row's outputs, "same": share of classes}."""
    cosines = [
        min(
            float(np.vdot(a, b) / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-30))
            for a, b in zip(mine, theirs, strict=True)
        )
        for mine, theirs in zip(found, expected, strict=True)
    ]
    share = None
    if all(len(row) == 1 and row[0].ndim == 2 and row[0].shape[1] > 1 for row in expected):
        pairs = zip(found, expected, strict=True)
        share = float(np.mean([a[0].argmax() == b[0].argmax() for a, b in pairs]))
    return {"cosine": float(np.mean(cosines)), "same": share}


def measure(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """{system: what it keeps, its bytes and times, or its error}."""
    folder = asked.work / "runs" / name
    done = json.loads((folder / "result.json").read_text())
    model = json.loads((folder / "recipe.yaml").read_text())["model"]
    file, outputs = Path(model["source"]), model["outputs"]
    rows = {use: dict(np.load(folder / f"{use}.npz")) for use in ("calibrate", "evaluate")}
    data = write_batches(dict(enumerate(each(rows["calibrate"]))), folder / "batches.npz")

    def by_nncf() -> Path:
        out = folder / "nncf.xml"
        config = {"kind": "nncf", "model": str(file), "calibration": str(data), "out": str(out)}
        command = [asked.nncf_python, "-m", WORKER, json.dumps(config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        return out

    makers: dict[str, Callable[[], Path]] = {
        FLOAT: lambda: file,
        "ours": lambda: Path(done["lowered"]),
        "ort-static": lambda: ort_static(file, rows["calibrate"], folder / "static.onnx"),
    }
    if asked.nncf_python:
        makers["nncf"] = by_nncf
    result: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    expected: list[list[NDArray[Any]]] = []
    for system, make in makers.items():
        try:
            made = make()
            run = open_model(made, outputs)
            answers = [run(row) for row in each(rows["evaluate"])]
        except Exception as e:  # a peer that fails is a row with its message
            if system in (FLOAT, "ours"):
                raise
            said = re.sub(r"/\S+/", "", f"{type(e).__name__}: {e}".split("\n")[0])
            result[system] = {"error": said[:160].replace("|", " ")}
            continue
        expected = expected or answers
        size = sum(f.stat().st_size for f in made.parent.glob(f"{made.stem}.*") if _is_model(f))
        result[system] = kept(answers, expected) | {"bytes": size}
        runs[system] = run
    for system, timed in time_in_turns(runs, each(rows["evaluate"])[0], asked.rounds).items():
        result[system] |= timed
    return result


def _is_model(file: Path) -> bool:
    return file.suffix in (".onnx", ".data", ".xml", ".bin")


def page(result: Mapping[str, Any]) -> str:
    """The page of results."""
    cells = []
    for name, systems in result["rows"].items():
        for system, row in systems.items():
            if "error" in row:
                cells.append([name, TITLES[system], row["error"], "", "", "", ""])
                continue
            same = "" if row["same"] is None else f"{100 * row['same']:.0f} %"
            cells.append(
                [
                    *(name, TITLES[system], f"{row['cosine']:.4f}", same),
                    *(f"{row['bytes'] / 1000:.0f}", with_interval(row["ratio"])),
                    f"{row['ms']['p50']:.2f}",
                ]
            )
    about = result["conditions"]
    heads = ["file", "system", "cosine", "same class", "kB", "time to float", "ms"]
    machine = ", ".join((about["machine"]["cpu"], *about["machine"]["flags"]))
    return f"""# INT8 of five ONNX files

`python -m benchmarks.onnx.peers`: answers of {result["judged"]} drawn rows beside those of the
float file, after calibration on {result["calibrated"]} others. Time: processor time of one row on
one thread, median over {about["rounds"]} rounds in turns [95 % interval].

{table(heads, cells)}

{machine}; load average {about["load_average"]} before and after; {about["when"]}.
"""


def main() -> None:
    from benchmarks.onnx.files import CALIBRATED, JUDGED

    asked, load = arguments(), os.getloadavg()[0]
    rows = {}
    for name in asked.name:
        rows[name] = measure(name, asked)
        print(name, rows[name], file=sys.stderr, flush=True)
    result = {"rows": rows, "calibrated": CALIBRATED, "judged": JUDGED}
    result["conditions"] = conditions(load, asked.rounds, "cpu")
    write(result, page(result), asked.out, "onnx_peers")


if __name__ == "__main__":
    main()
