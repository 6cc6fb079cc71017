"""One system in a process of its own, driven line by line over stdin and stdout.

    python worker.py '{"kind": ..., "model": ..., "threads": n, "options": {...},
                       "contract": contract.json, "inputs": timing.npz}'
    {"run": n, "warmup": w, "batch": b, "clock": "wall" | "cpu"}   -> {"ms": [n times]}
    {"embed": batches.npz, "out": file.npy}    -> {"texts": count}

A kind of "nncf" instead writes a quantized OpenVINO model and ends. Runs in the project's
environment or in OpenVINO's own: beyond numpy it imports only the runtime it is asked for.
Array files hold "<batch number or size>.<input name>".
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Batch = dict[str, Any]
Run = Callable[[Batch], Any]


def read_batches(path: str) -> dict[int, Batch]:
    """{number: {input: array}} of an array file."""
    found: dict[int, Batch] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            number, _, name = key.partition(".")
            found.setdefault(int(number), {})[name] = arrays[key]
    return found


def pin(threads: int) -> None:
    """The same first cores for every system; set before a runtime makes its threads."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[:threads]))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def ours(model: str, threads: int, _options: dict[str, Any]) -> Run:
    """Through the runner that serves a bundle."""
    from optimizer.harness.runtimes.ort.run import OrtRunner

    runner = OrtRunner(Path(model), device="cpu", threads=threads)
    return lambda batch: runner.infer(batch)["last_hidden_state"]


def served(model: str, threads: int, options: dict[str, Any]) -> Run:
    """Through the runner that serves a bundle of target openvino. options: precision."""
    from optimizer.harness.runtimes.openvino.run import OpenVinoRunner, OpenVinoSettings

    runner = OpenVinoRunner(Path(model), OpenVinoSettings(**options), threads=threads)
    return lambda batch: runner.infer(batch)["last_hidden_state"]


def onnxruntime(model: str, threads: int, options: dict[str, Any]) -> Run:
    """A plain session. options: disabled_optimizers. Workers spin while a run lasts, as in
    ours."""
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 3
    settings.add_session_config_entry("session.intra_op.allow_spinning", "1")
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    session = ort.InferenceSession(
        model,
        settings,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=options.get("disabled_optimizers"),
    )
    return lambda batch: session.run(["last_hidden_state"], batch)[0]


def torch(model: str, threads: int, options: dict[str, Any]) -> Run:
    """The checkpoint with scaled-dot-product attention. options: compile, its mode;
    freeze."""
    import torch
    from transformers import AutoModel

    torch.set_num_threads(threads)
    module = AutoModel.from_pretrained(
        model, attn_implementation="sdpa", add_pooling_layer=False, dtype=torch.float32
    ).eval()
    if options.get("compile"):
        import torch._inductor.config as inductor

        inductor.freezing = bool(options.get("freeze"))  # fold and pack the weights
        module = torch.compile(module, mode=options["compile"], dynamic=False)

    def run(batch: Batch) -> Any:
        with torch.no_grad():
            tensors = {name: torch.from_numpy(a) for name, a in batch.items()}
            return module(**tensors).last_hidden_state.numpy()

    return run


def openvino(model: str, threads: int, options: dict[str, Any]) -> Run:
    """options: fixed, compile once per input shape instead of for any; precision, fp32 when it is
    absent."""
    import openvino as ov

    core, opened, precision = ov.Core(), {}, options.get("precision", "fp32")
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": {"fp32": "f32"}.get(precision, precision),
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
    }

    def request(shape: tuple[int, ...] | None) -> Any:
        if shape not in opened:
            read = core.read_model(model)
            if shape is not None:
                read.reshape({i.any_name: list(shape) for i in read.inputs})
            opened[shape] = core.compile_model(read, "CPU", settings).create_infer_request()
        return opened[shape]

    def run(batch: Batch) -> Any:
        shape = batch["input_ids"].shape if options.get("fixed") else None
        return next(iter(request(shape).infer(batch).values()))

    return run


def nncf(model: str, calibration: str, out: str) -> None:
    """Float ONNX -> INT8 OpenVINO file, with NNCF's settings for transformers."""
    import nncf as quantizer
    import openvino as ov

    data = list(read_batches(calibration).values())
    quantized = quantizer.quantize(
        ov.convert_model(model),
        quantizer.Dataset(data),
        model_type=quantizer.ModelType.TRANSFORMER,
        subset_size=len(data),
    )
    ov.save_model(quantized, out, compress_to_fp16=False)


KINDS: dict[str, Callable[[str, int, dict[str, Any]], Run]] = {
    "ours": ours,
    "served": served,
    "onnxruntime": onnxruntime,
    "torch": torch,
    "openvino": openvino,
}


def embed(run: Run, path: str, contract: Any, out: str) -> int:
    """Embeddings (texts, hidden) by the project's own pooling, written as one array."""
    from harness.tasks import decode

    made = [decode(contract, {"last_hidden_state": run(b)}, b) for b in read_batches(path).values()]
    np.save(out, np.concatenate(made))
    return sum(len(m) for m in made)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def measure(run: Run, batch: Batch, count: int, warmup: int, clock: str) -> list[float]:
    """Milliseconds of each of `count` calls. clock: a key of CLOCKS; "cpu" is of all threads."""
    now = CLOCKS[clock]
    for _ in range(warmup):
        run(batch)
    times = []
    for _ in range(count):
        start = now()
        run(batch)
        times.append(1000 * (now() - start))
    return times


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a runtime prints goes to the log
    config = json.loads(sys.argv[1])
    if config["kind"] == "nncf":
        nncf(config["model"], config["calibration"], config["out"])
        return
    pin(config["threads"])
    from optimizer.harness.contract import read

    contract, inputs = read(Path(config["contract"])), read_batches(config["inputs"])
    run = KINDS[config["kind"]](config["model"], config["threads"], config["options"])
    for line in sys.stdin:
        asked = json.loads(line)
        if "embed" in asked:
            answer: Any = {"texts": embed(run, asked["embed"], contract, asked["out"])}
        else:
            batch = inputs[asked["batch"]]
            answer = {
                "ms": measure(run, batch, asked["run"], asked["warmup"], asked.get("clock", "wall"))
            }
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
