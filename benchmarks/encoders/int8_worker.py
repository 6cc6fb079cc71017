"""Worker process of one encoder system.

    python -m benchmarks.encoders.int8_worker '{"kind": ..., "model": ..., "threads": n,
        "options": {...}, "contract": contract.json, "inputs": timing.npz}'
    {"run": n, "warmup": w, "batch": b, "clock": "wall" | "cpu"}   -> {"ms": [n times]}
    {"embed": batches.npz, "out": file.npy}    -> {"texts": count}

The kind "nncf" writes a quantized OpenVINO model instead and ends. The module runs in the project's
environment or in OpenVINO's own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure.worker import (
    Batch,
    Run,
    answer_requests,
    load_openvino,
    measure,
    pin,
    read_batches,
    redirect_output,
)


def ours(model: str, threads: int, _options: dict[str, Any]) -> Run:
    """Load the model with the runner that serves a bundle."""
    from optimizer.harness.runtimes.ort.run import OrtRunner

    runner = OrtRunner(Path(model), device="cpu", threads=threads)
    return lambda batch: runner.infer(batch)["last_hidden_state"]


def served(model: str, threads: int, options: dict[str, Any]) -> Run:
    """Load the model with the runner that serves a bundle of target openvino."""
    from optimizer.harness.runtimes.openvino.run import OpenVinoRunner, OpenVinoSettings

    runner = OpenVinoRunner(Path(model), OpenVinoSettings(**options), threads=threads)
    return lambda batch: runner.infer(batch)["last_hidden_state"]


def onnxruntime(model: str, threads: int, options: dict[str, Any]) -> Run:
    """Open a plain session, whose threads spin during a run as ours do.

    options: `disabled_optimizers`; `output` that is read, default last_hidden_state
    """
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
    output = options.get("output", "last_hidden_state")
    return lambda batch: session.run([output], batch)[0]


def torch(model: str, threads: int, options: dict[str, Any]) -> Run:
    """Load the checkpoint with scaled-dot-product attention.

    options: `compile` (its mode), `freeze`
    """
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


def nncf(model: str, calibration: str, out: str) -> None:
    """Write a float ONNX model as an INT8 OpenVINO file, with NNCF's settings for transformers."""
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
    "openvino": load_openvino,
}


def embed(run: Run, path: str, contract: Any, out: str) -> int:
    """Write embeddings (texts, hidden) as one array; count them.

    Answers (texts, tokens, hidden) are pooled by the project's code.
    """
    from optimizer.harness.tasks import decode

    batches = list(read_batches(path).values())
    answers = [run(batch) for batch in batches]
    made = [
        a if a.ndim == 2 else decode(contract, {"last_hidden_state": a}, batch)
        for a, batch in zip(answers, batches, strict=True)
    ]
    np.save(out, np.concatenate(made))
    return sum(len(m) for m in made)


def main() -> None:
    answers, config = redirect_output(), json.loads(sys.argv[1])
    if config["kind"] == "nncf":
        nncf(config["model"], config["calibration"], config["out"])
        return
    pin(config["threads"])
    from optimizer.harness.contract import read

    contract, inputs = read(Path(config["contract"])), read_batches(config["inputs"])
    run = KINDS[config["kind"]](config["model"], config["threads"], config["options"])

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if "embed" in asked:
            return {"texts": embed(run, asked["embed"], contract, asked["out"])}
        return {"ms": measure(run, inputs[asked["batch"]], asked)}

    answer_requests(answers, answer)


if __name__ == "__main__":
    main()
