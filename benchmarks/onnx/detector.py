"""INT8 of a YOLO-shaped detector on a CPU: ours, ONNX Runtime's quantize_static and NNCF.

    python -m benchmarks.onnx.detector --nncf-python .venv-openvino/bin/python

The detector (shapes.py) is trained on drawn images in about a minute, exported with
torch.onnx.export, and quantized by each system on the same 100 images. mAP (pycocotools) is of 300
other images, with one NMS for all; time is processor time of one thread, in turns with the float
model. Writes results/onnx_detector.md and .json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure.results import RESULTS, conditions, table, with_interval, write
from benchmarks.measure.turns import summarize
from benchmarks.measure.worker import write_batches
from benchmarks.onnx import shapes
from benchmarks.onnx.shapes import Array
from optimizer.foundation import state as states
from optimizer.foundation.progress import say
from optimizer.recipe.schema import Recipe
from optimizer.store import Store

INPUT, FLOAT = "images", "float"
CALIBRATION, EVALUATION = 100, 300
OVERLAP, LEAST, MOST = 0.6, 0.005, 100
"""IoU above which the lower score goes, lowest score, and maximum boxes of an image."""
SUFFIXES = (".onnx", ".data", ".xml", ".bin")
WORKER = "benchmarks.vision.int8_worker"
Run = Callable[[Array], Array]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--nncf-python", type=Path, help="an interpreter with nncf and openvino")
    p.add_argument("--steps", type=int, default=500, help="of training, 16 images each")
    p.add_argument("--rounds", type=int, default=12)
    p.add_argument("--out", type=Path, default=RESULTS)
    p.add_argument("--weights", type=Path, help="state_dict of an earlier training")
    p.add_argument("--keep-float-auto", type=float, help="max_error of ours, with its usual share")
    return p.parse_args()


def export(detector: shapes.Detector, file: Path) -> Path:
    """Write the detector as an ONNX file with an open batch axis."""
    rows = {0: torch.export.Dim("batch")}
    image = torch.rand(2, 3, shapes.SIZE, shapes.SIZE)
    program = torch.onnx.export(
        detector,
        (image,),
        dynamo=True,
        dynamic_shapes=(rows,),
        input_names=[INPUT],
        output_names=["predictions"],
        verbose=False,
    )
    assert program is not None
    program.save(str(file))
    return file


def ours(file: Path, calibration: Array, folder: Path, max_error: float | None) -> tuple[Path, str]:
    """(INT8 file for ONNX Runtime, what stays float)."""
    from optimizer.compress.stage import STAGE as compress
    from optimizer.export.stage import STAGE as export_stage
    from optimizer.load.stage import STAGE as load
    from optimizer.lower.stage import STAGE as lower

    np.savez(folder / "calibrate.npz", **{INPUT: calibration})
    data = {"source": "npz", "files": [str(folder / "calibrate.npz")], "columns": {"arrays": "*"}}
    auto = {} if max_error is None else {"keep_float_auto": {"max_error": max_error}}
    recipe = Recipe.model_validate_json(
        json.dumps(
            {
                "name": "detector",
                "model": {"source": str(file), "task": "tensors"},
                "calibrate": {"data": data, "samples": len(calibration)},
                "quantize": {"method": "rtn", "activations": {"range": "minmax"}, **auto},
                "targets": [{"runtime": "onnxruntime", "allow_precision_fallback": True}],
                "validate": {"data": data, "metric": "cosine"},
            }
        )
    )
    store = Store(folder / "store")
    source = store.step(load, recipe.model)
    state = store.step(compress, recipe.compression, source)
    graph = store.step(export_stage, recipe.targets[0].export, source, state)
    lowered = store.step(lower, recipe.targets[0], source, state, graph)
    kept = [n.module for n in states.read(state.path).notes if n.kind == "float"]
    return lowered.path / "model.onnx", ", ".join(kept)


def ort_static(file: Path, calibration: Array, out: Path) -> Path:
    """Quantize with ONNX Runtime: uint8 activations by minmax, int8 weights per channel."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(calibration[:, None])

        def get_next(self) -> Any:
            image = next(self.left, None)
            return None if image is None else {INPUT: image}

    ready = out.with_name("prepared.onnx")
    # its symbolic inference does not finish on graphs of torch's exporter
    quant_pre_process(str(file), str(ready), skip_symbolic_shape=True)
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(str(ready), str(out), Reader(), per_channel=True, **types)
    return out


def nncf(python: Path, file: Path, data: Path, out: Path) -> Path:
    """Quantize with NNCF's defaults for OpenVINO, in a process of its environment."""
    config = {"kind": "nncf", "model": str(file), "calibration": str(data), "out": str(out)}
    command: list[str | Path] = [python, "-m", WORKER, json.dumps(config)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return out


def open_model(file: Path) -> Run:
    """A function from images to the output, on one thread."""
    if file.suffix == ".xml":
        import openvino as ov

        settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        compiled = ov.Core().compile_model(file, "CPU", settings)
        return lambda images: np.array(compiled({INPUT: images})[0])
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda images: np.asarray(session.run(None, {INPUT: images})[0])


def boxes_of(row: Array) -> list[tuple[Array, float, int]]:
    """[(x, y, w, h from the upper left corner), score, class] after NMS of each class."""
    kept: list[tuple[Array, float, int]] = []
    for kind, scores in enumerate(row[4:]):
        order = np.argsort(-scores, kind="stable")[:MOST]
        order = order[scores[order] > LEAST]
        size = row[2:4, order].T
        low = row[:2, order].T - size / 2
        high = low + size
        sides = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
        both, area = sides.clip(0).prod(2), size.prod(1)
        close = both > OVERLAP * (area[:, None] + area - both)
        left = np.ones(len(order), bool)
        for k, anchor in enumerate(order):
            if left[k]:
                kept.append((np.concatenate([low[k], size[k]]), float(scores[anchor]), kind))
                left &= ~close[k]
    return sorted(kept, key=lambda box: -box[1])[:MOST]


def average_precision(predictions: list[Array], labels: list[Array]) -> dict[str, float]:
    """{"50": mAP@50, "50:95": mAP@50:95} in percent, by pycocotools."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = [
        {"id": n, "image_id": i, "category_id": int(k), "bbox": [x - w / 2, y - h / 2, w, h]}
        | {"area": w * h, "iscrowd": 0}
        for n, (i, (x, y, w, h, k)) in enumerate(
            ((i, row) for i, rows in enumerate(labels) for row in rows.tolist()), 1
        )
    ]
    results = [
        {"image_id": i, "category_id": kind, "bbox": box.tolist(), "score": score}
        for i, row in enumerate(predictions)
        for box, score, kind in boxes_of(row)
    ]
    if not results:
        return {"50": 0.0, "50:95": 0.0}
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "images": [{"id": i} for i in range(len(labels))],
            "categories": [{"id": k} for k in range(shapes.CLASSES)],
            "annotations": truth,
        }
        coco.createIndex()
        evaluated = COCOeval(coco, coco.loadRes(results), "bbox")
        evaluated.evaluate()
        evaluated.accumulate()
        evaluated.summarize()
    return {"50": 100 * float(evaluated.stats[1]), "50:95": 100 * float(evaluated.stats[0])}


def time_in_turns(runs: dict[str, Run], image: Array, rounds: int) -> dict[str, Any]:
    """Processor time of one image, as benchmarks.measure.turns.summarize."""
    times: dict[str, list[list[float]]] = {name: [] for name in runs}
    names = list(runs)
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            runs[name](image)
            each = []
            for _ in range(16):
                start = time.process_time()
                runs[name](image)
                each.append(1000 * (time.process_time() - start))
            times[name].append(each)
    return summarize(times, FLOAT)


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Quantize, judge and time all systems."""
    if asked.weights:
        detector = shapes.Detector()
        detector.load_state_dict(torch.load(asked.weights, weights_only=True))
    else:
        detector = shapes.train(asked.steps)
    file = export(detector.eval(), folder / "detector.onnx")
    calibration = shapes.draw(CALIBRATION, 1)[0]
    data = write_batches(
        {i: {INPUT: calibration[i : i + 1]} for i in range(CALIBRATION)}, folder / "rows.npz"
    )
    int8, kept = ours(file, calibration, folder, asked.keep_float_auto)
    files = {FLOAT: file, "ours": int8}
    files["ort-static"] = ort_static(file, calibration, folder / "static.onnx")
    if asked.nncf_python:
        files["nncf"] = nncf(asked.nncf_python, file, data, folder / "nncf.xml")
    images, labels = shapes.draw(EVALUATION, 2)
    runs, rows = {name: open_model(f) for name, f in files.items()}, dict[str, Any]()
    for name, run in runs.items():
        say(name)
        answers = [row for i in range(0, len(images), 20) for row in run(images[i : i + 20])]
        size = sum(
            f.stat().st_size
            for f in files[name].parent.glob(f"{files[name].stem}.*")
            if f.suffix in SUFFIXES
        )
        rows[name] = {"map": average_precision(answers, labels), "bytes": size}
        say(f"{name}: {rows[name]}")
    for name, timed in time_in_turns(runs, images[:1], asked.rounds).items():
        rows[name] |= timed
    return {"rows": rows, "float_modules": kept}


TITLES = {
    FLOAT: "ONNX Runtime float",
    "ours": "**ours, INT8, ONNX Runtime**",
    "ort-static": "ONNX Runtime quantize_static",
    "nncf": "OpenVINO + NNCF INT8",
}


def page(result: dict[str, Any]) -> str:
    """The page of results."""
    rows, about = result["rows"], result["conditions"]
    base = rows[FLOAT]["map"]
    cells = [
        [
            TITLES[name],
            *(f"{r['map'][k]:.1f} ({r['map'][k] - base[k]:+.1f})" for k in ("50", "50:95")),
            f"{r['bytes'] / 1000:.0f}",
            with_interval(r["ratio"]),
            f"{r['ms']['p50']:.2f}",
        ]
        for name, r in rows.items()
    ]
    heads = ["system", "mAP@50", "mAP@50:95", "kB", "time to float", "ms"]
    machine = ", ".join((about["machine"]["cpu"], *about["machine"]["flags"]))
    return f"""# INT8 of a YOLO-shaped detector

`python -m benchmarks.onnx.detector`: a detector whose one output joins boxes of 0 to {shapes.SIZE}
and scores of 0 to 1, trained on drawn images, quantized on {CALIBRATION} images, judged on
{EVALUATION} others (difference to float in points). Time: processor time of one image on one
thread, median over {about["rounds"]} rounds in turns [95 % interval].

{table(heads, cells)}

Ours keeps in float: {result["float_modules"] or "nothing"}.

{machine}; load average {about["load_average"]} before and after; {about["when"]}.
"""


def main() -> None:
    asked, load = arguments(), os.getloadavg()[0]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="detector-") as folder:
        result = measure(asked, Path(folder))
    result["conditions"] = conditions(load, asked.rounds, "cpu")
    write(result, page(result), asked.out, "onnx_detector")


if __name__ == "__main__":
    main()
