"""Worker process of one preprocessing, from file bytes to a batch of pixels.

    python -m benchmarks.vision.preprocessing_worker '{"kind": ..., "model": checkpoint,
        "threads": n, "options": {}, "contract": contract.json, "inputs": folder of files}'
    {"run": n, "warmup": w, "batch": b, "clock": "wall" | "cpu"}   -> {"ms": [n times]}
    {"answer": n, "out": file.npy}   -> {"images": n}: the pixels of the first n files, one batch

A call takes the next b files, so that n calls see n different images of a batch of one. Runs in the
project's environment, or in one of its own with torchvision.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure.worker import Run, answer_requests, measure, pin, redirect_output

Files = Sequence[bytes]
Prepare = Callable[[Files], Any]


def ours(config: dict[str, Any]) -> Prepare:
    """Prepare images as a bundle's harness does."""
    from optimizer.harness.contract import read
    from optimizer.harness.tasks import encode

    contract = read(Path(config["contract"]))
    return lambda files: encode(contract, None, list(files))["pixel_values"]


def decoding(config: dict[str, Any]) -> Prepare:
    """Decode only, as ours does first: RGB in Pillow, rotated by EXIF."""
    from optimizer.harness.inputs.image_file import load_image

    del config
    return lambda files: [load_image(file, 3) for file in files]


def processor(config: dict[str, Any]) -> Prepare:
    """Prepare images with transformers' image processor.

    options: `backend` ("pil" or "torchvision"), and `decode` ("pillow", or for the second backend
        "torchvision")
    """
    from PIL import Image
    from transformers import AutoImageProcessor

    backend = config["options"]["backend"]
    made = AutoImageProcessor.from_pretrained(config["model"], backend=backend)
    assert made.backend == backend
    if config["options"]["decode"] == "pillow":

        def opened(file: bytes) -> Any:
            return Image.open(io.BytesIO(file)).convert("RGB")

    else:
        import torch
        from torchvision.io import ImageReadMode, decode_image

        def opened(file: bytes) -> Any:
            data = torch.frombuffer(bytearray(file), dtype=torch.uint8)
            return decode_image(data, mode=ImageReadMode.RGB, apply_exif_orientation=True)

    tensors = {"pil": "np", "torchvision": "pt"}[backend]

    def prepare(files: Files) -> Any:
        return made([opened(f) for f in files], return_tensors=tensors)["pixel_values"]

    return prepare


KINDS: dict[str, Callable[[dict[str, Any]], Prepare]] = {
    "ours": ours,
    "decoding": decoding,
    "processor": processor,
}


def in_turn(prepare: Prepare, files: Files) -> Run:
    """Make run(b), which prepares the next b files and starts over after the last."""
    taken = count(step=1)

    def run(batch: Any) -> Any:
        return prepare([files[next(taken) % len(files)] for _ in range(batch)])

    return run


def main() -> None:
    answers, config = redirect_output(), json.loads(sys.argv[1])
    pin(config["threads"])
    if config["kind"] == "processor" and config["options"]["backend"] == "torchvision":
        import torch

        torch.set_num_threads(config["threads"])
    files = [f.read_bytes() for f in sorted(Path(config["inputs"]).iterdir())]
    prepare = KINDS[config["kind"]](config)
    run = in_turn(prepare, files)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if "answer" in asked:
            np.save(asked["out"], np.asarray(prepare(files[: asked["answer"]])))
            return {"images": asked["answer"]}
        return {"ms": measure(run, asked["batch"], asked)}

    answer_requests(answers, answer)


if __name__ == "__main__":
    main()
