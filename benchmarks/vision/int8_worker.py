"""Worker process of one image classifier.

    python -m benchmarks.vision.int8_worker '{"kind": ..., "model": ..., "threads": n,
        "options": {...}, "inputs": timing.npz}'
    {"run": n, "warmup": w, "batch": b, "clock": "wall" | "cpu"}   -> {"ms": [n times]}
    {"answer": batches.npz, "out": file.npy}   -> {"images": count}: logits (images, labels)

The kinds "ort-static" and "nncf" write a quantized model instead and end. The module runs in the
project's environment or in OpenVINO's own.
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

INPUT = "pixel_values"


def onnxruntime(model: str, threads: int, _options: dict[str, Any]) -> Run:
    """Open a plain session."""
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 3
    session = ort.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, batch)[0]


def torch(model: str, threads: int, options: dict[str, Any]) -> Run:
    """Load the checkpoint. options: `compile`, with frozen weights."""
    import torch
    from transformers import AutoModelForImageClassification

    torch.set_num_threads(threads)
    module: Any = AutoModelForImageClassification.from_pretrained(model, trust_remote_code=True)
    module = module.eval()
    if options.get("compile"):
        import torch._inductor.config as inductor

        inductor.freezing = True
        module = torch.compile(module, dynamic=False)

    def run(batch: Batch) -> Any:
        with torch.no_grad():
            return module(torch.from_numpy(batch[INPUT])).logits.numpy()

    return run


def ort_static(model: str, calibration: str, out: str) -> None:
    """Quantize with ONNX Runtime: uint8 activations by minmax, int8 weights per channel."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(read_batches(calibration).values())

        def get_next(self) -> Any:
            return next(self.left, None)

    ready = str(Path(out).with_suffix(".ready.onnx"))
    quant_pre_process(model, ready)
    quantize_static(
        ready,
        out,
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )


def nncf(model: str, calibration: str, out: str) -> None:
    """Write a float ONNX model as an INT8 OpenVINO file, with NNCF's defaults."""
    import nncf as quantizer
    import openvino as ov

    data = list(read_batches(calibration).values())
    converted = ov.convert_model(model)
    quantized = quantizer.quantize(converted, quantizer.Dataset(data), subset_size=len(data))
    ov.save_model(quantized, out, compress_to_fp16=False)


WRITERS = {"ort-static": ort_static, "nncf": nncf}
KINDS: dict[str, Callable[[str, int, dict[str, Any]], Run]] = {
    "onnxruntime": onnxruntime,
    "torch": torch,
    "openvino": load_openvino,
}


def main() -> None:
    answers, config = redirect_output(), json.loads(sys.argv[1])
    if config["kind"] in WRITERS:
        WRITERS[config["kind"]](config["model"], config["calibration"], config["out"])
        return
    pin(config["threads"])
    inputs = read_batches(config["inputs"])
    run = KINDS[config["kind"]](config["model"], config["threads"], config["options"])

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if "answer" in asked:
            logits = np.concatenate([run(b) for b in read_batches(asked["answer"]).values()])
            np.save(asked["out"], logits)
            return {"images": len(logits)}
        return {"ms": measure(run, inputs[asked["batch"]], asked)}

    answer_requests(answers, answer)


if __name__ == "__main__":
    main()
