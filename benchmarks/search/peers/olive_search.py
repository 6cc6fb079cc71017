"""Search of Olive over quantizations of an ONNX model, run in Olive's environment.

    OMP_NUM_THREADS=1 PYTHON -m benchmarks.search.peers.olive_search FOLDER SECONDS MARGIN

FOLDER has model.onnx, whose output `logits` are of its node `probe`, and array files of
benchmarks/measure/worker.py: calibration.npz, timing.npz, and evaluation.npz with arrays `label`.
Olive searches over all values that its pass OnnxQuantization searches by default (dynamic, static
with three ways of calibration and two formats, types of weights, per channel, reduced range), once
with every operator that ONNX Runtime quantizes and once with MatMul alone, for SECONDS. The answer
of node `probe` stays float, as it does in `optimize search`. Of the models whose accuracy is at
most MARGIN below that of model.onnx, Olive returns the one with the lowest mean time.

Writes olive.json: chosen, file of the model (None: Olive returned none); options of its pass;
metrics that Olive measured of it; models that were evaluated; within, those of them within the
margin; seconds of wall time.

Olive imports this file again as its user script.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from olive.data.registry import Registry  # type: ignore[import-not-found, unused-ignore]

from benchmarks.measure.worker import read_batches


@Registry.register_dataset("texts")  # type: ignore[untyped-decorator, unused-ignore]
def read_texts(**options: Any) -> list[tuple[dict[str, Any], Any]]:
    """Read (arrays, label) of each text in the array file `options["file"]`."""
    rows = []
    for batch in read_batches(options["file"]).values():
        label = batch.pop("label", np.zeros(1, np.int64))[0]
        rows.append(({n: torch.from_numpy(a[0]) for n, a in batch.items()}, label))
    return rows


@Registry.register_post_process("classes")  # type: ignore[untyped-decorator, unused-ignore]
def choose_classes(output: Any) -> Any:
    """Return the class of each row."""
    return output["logits"].argmax(-1)


def configure(folder: Path, seconds: int, margin: float) -> dict[str, Any]:
    """Configure the search."""

    def data(name: str) -> dict[str, Any]:
        params = {"file": str(folder / f"{name}.npz")}
        return {
            "name": f"of_{name}",  # Olive takes the name of a folder for its path
            "user_script": __file__,
            "load_dataset_config": {"type": "texts", "params": params},
            "post_process_data_config": {"type": "classes"},
        }

    accuracy = {
        "name": "accuracy_score",
        "priority": 2,
        "higher_is_better": True,
        "metric_config": {"task": "multiclass", "num_classes": 2},
        "goal": {"type": "max-degradation", "value": margin},
    }
    one_thread = {"onnx": {"session_options": {"intra_op_num_threads": 1}}}
    own = {"user_config": {"inference_settings": one_thread}}
    metrics = [
        {"name": "latency", "type": "latency", "data_config": "of_timing", **own}
        | {"sub_types": [{"name": "avg", "priority": 1}]},
        {"name": "quality", "type": "accuracy", "data_config": "of_evaluation", **own}
        | {"sub_types": [accuracy]},
    ]
    every = {
        "type": "OnnxQuantization",
        "data_config": "of_calibration",
        "nodes_to_exclude": ["probe"],
    }
    here = {"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}
    return {
        "input_model": {"type": "ONNXModel", "model_path": str(folder / "model.onnx")},
        "data_configs": [data(name) for name in ("calibration", "timing", "evaluation")],
        "evaluators": {"own": {"metrics": metrics}},
        "evaluator": "own",
        "passes": {"quantization": [every, every | {"op_types_to_quantize": ["MatMul"]}]},
        "search_strategy": {"execution_order": "joint", "sampler": "tpe", "max_time": seconds},
        "systems": {"here": {"type": "LocalSystem", "accelerators": [here]}},
        "host": "here",
        "target": "here",
        "cache_dir": str(folder / "olive" / "cache"),
        "output_dir": str(folder / "olive" / "output"),
    }


def main() -> None:
    from olive.workflows import run  # type: ignore[import-not-found, unused-ignore]

    folder, started = Path(sys.argv[1]).resolve(), time.monotonic()
    output = run(configure(folder, int(sys.argv[2]), float(sys.argv[3])))
    wall = time.monotonic() - started
    every = output.footprint.nodes
    nodes = [n for n in every.values() if n.metrics and n.parent_model_id]
    best = output.get_best_candidate()
    document = {
        "chosen": best.model_path if best else None,
        "options": every[best.model_id].pass_run_config if best else None,
        "metrics": best.metrics_value if best else None,
        "models": len(nodes),
        "within": sum(n.metrics.if_goals_met for n in nodes),
        "seconds": wall,
    }
    (folder / "olive.json").write_text(json.dumps(document, indent=1, default=str))


if __name__ == "__main__":
    main()
