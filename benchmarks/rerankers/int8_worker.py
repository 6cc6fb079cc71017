"""Worker process of one cross-encoder.

    python -m benchmarks.rerankers.int8_worker '{"kind": "bundle" | "library", "model": ...,
        "threads": n, "options": {...}, "pairs": pairs-time.jsonl}'
    {"run": n, "warmup": w, "batch": b, "clock": "wall" | "cpu"}   -> {"ms": [n times]}
    {"score": pairs.jsonl, "out": file.npy}                        -> {"pairs": count}

The kind "quantize" writes sentence-transformers' exports instead and ends. The module runs in the
project's environment or in the library's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure.worker import answer_requests, measure, pin, redirect_output

Pairs = list[tuple[str, str]]
Score = Callable[[Pairs], Any]
LONGEST = 32  # pairs at once


def read(path: str) -> Pairs:
    with Path(path).open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["query"], row["passage"]) for row in rows]


def bundle(model: str, threads: int, options: dict[str, Any]) -> Score:
    """Open a bundle as its harness does."""
    from optimizer.harness.bundle.bundle import Bundle

    opened = Bundle(Path(model), runtime=options["runtime"], threads=threads)

    def score(pairs: Pairs) -> Any:
        queries, passages = zip(*pairs, strict=True)
        return [a["score"] for a in opened.predict(queries, passages, batch_size=LONGEST)]

    return score


def library(model: str, threads: int, options: dict[str, Any]) -> Score:
    """Open a CrossEncoder in one of its backends."""
    import torch

    torch.set_num_threads(threads)
    from sentence_transformers import CrossEncoder

    settings: dict[str, Any] = {} if options["file"] is None else {"file_name": options["file"]}
    if options["backend"] == "onnx":
        import onnxruntime

        session = onnxruntime.SessionOptions()
        session.intra_op_num_threads = threads
        settings |= {"session_options": session, "provider": "CPUExecutionProvider"}
    if options["backend"] == "openvino":
        settings["ov_config"] = {"INFERENCE_NUM_THREADS": threads}
    opened = CrossEncoder(model, backend=options["backend"], model_kwargs=settings, device="cpu")
    return lambda pairs: opened.predict(pairs, batch_size=LONGEST, show_progress_bar=False)


def quantize(model: str, out: str) -> None:
    """Write the library's exports, in float and quantized, to <out>/onnx and <out>/openvino."""
    from sentence_transformers import (
        CrossEncoder,
        export_dynamic_quantized_onnx_model,
        export_static_quantized_openvino_model,
    )

    for backend in ("onnx", "openvino"):
        folder = str(Path(out, backend))
        encoder = CrossEncoder(model, backend=backend, device="cpu")
        encoder.save_pretrained(folder)
        if backend == "onnx":
            export_dynamic_quantized_onnx_model(encoder, "avx512_vnni", folder)
        else:
            export_static_quantized_openvino_model(
                encoder,
                None,
                folder,
                dataset_name=str(Path(out, "calibrate")),
                dataset_config_name="default",
                dataset_split="train",
                column_name="text",
                file_suffix="qint8",
            )


KINDS: dict[str, Callable[[str, int, dict[str, Any]], Score]] = {
    "bundle": bundle,
    "library": library,
}


def main() -> None:
    answers, config = redirect_output(), json.loads(sys.argv[1])
    if config["kind"] == "quantize":
        quantize(config["model"], config["out"])
        return
    pin(config["threads"])
    score = KINDS[config["kind"]](config["model"], config["threads"], config["options"])
    timed = read(config["pairs"])

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if "score" in asked:
            pairs = read(asked["score"])
            scores = np.array(
                [s for i in range(0, len(pairs), LONGEST) for s in score(pairs[i : i + LONGEST])]
            )
            np.save(asked["out"], scores)
            return {"pairs": len(scores)}
        return {"ms": measure(score, timed[: asked["batch"]], asked)}

    answer_requests(answers, answer)


if __name__ == "__main__":
    main()
